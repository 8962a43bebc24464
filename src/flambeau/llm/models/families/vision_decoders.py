"""Decoders of models with images only: those of other families, most of them rotated by rows and columns."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.models.families.config_parts import dense_layers, partial_rotation, uniform_bias
from flambeau.llm.models.families.family import Config
from flambeau.llm.models.families.llama_like import LLAMA_LIKE
from flambeau.llm.models.families.qwen_vl import (
    QWEN_2,
    QWEN_3,
    SECTION_KEYS,
    divided,
    one_after_another,
    pairs_of,
    sections,
)
from flambeau.llm.models.families.sigmoid_experts import SIGMOID_EXPERTS, glm_4_moe
from flambeau.llm.models.families.softmax_experts import SOFTMAX_EXPERTS, deepseek_1

SECTIONS = (8, 12, 12)


def glm_4v(config: Config) -> Config:
    return {**partial_rotation(config), **axes(config)}


def glm_ocr(config: Config) -> Config:
    return {**glm_4v(config), "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0)}


def glm_4v_moe(config: Config) -> Config:
    return {**glm_4_moe(config), **axes(config)}


def axes(config: Config) -> Config:
    """One section of the dimensions that are rotated after another."""
    num_pairs = (partial_rotation(config).get("rotary_size") or 2 * pairs_of(config)) // 2
    return {"position_axes": one_after_another(sections(config, SECTIONS, num_pairs, is_interleaved=False), num_pairs)}


def paddleocr_vl(config: Config) -> Config:
    return {**uniform_bias(config), **divided(config)}


def deepseek_ocr_2(config: Config) -> Config:
    return {
        **deepseek_1(config),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
        "routed_scale": float(config["routed_scaling_factor"]),
    }


_ERNIE, _DEEPSEEK = LLAMA_LIKE["Ernie4_5ForCausalLM"], SOFTMAX_EXPERTS["DeepseekForCausalLM"]
_GRANITE = LLAMA_LIKE["GraniteForCausalLM"]
_GLM_4, _GLM_4_MOE = LLAMA_LIKE["Glm4ForCausalLM"], SIGMOID_EXPERTS["Glm4MoeForCausalLM"]
VISION_DECODERS = {  # by the model_type of their section
    "qwen2_5_omni_text": replace(
        QWEN_2,
        model_type="qwen2_5_omni_text",
        vision=None,
        renames=(),
        defaults={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "sliding_window": 32768,
            "max_window_layers": 28,
        },
    ),
    "qwen3_omni_moe_text": replace(
        QWEN_3,
        model_type="qwen3_omni_moe_text",
        vision=None,
        experts=True,
        understands=SECTION_KEYS | {"interleaved"},  # another word for mrope_interleaved
        renames=(),
        defaults={
            "vocab_size": 3584,
            "hidden_size": 2048,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
    ),
    "glm4v_text": replace(
        _GLM_4,
        model_type="glm4v_text",
        qkv_bias=True,
        derive=glm_4v,
        understands=_GLM_4.understands | SECTION_KEYS,
        defaults={
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
    ),
    "glm_ocr_text": replace(
        _GLM_4,
        model_type="glm_ocr_text",
        qkv_bias=False,
        derive=glm_ocr,
        understands=_GLM_4.understands | SECTION_KEYS,
        defaults={
            "vocab_size": 59392,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
    ),
    "glm4v_moe_text": replace(
        _GLM_4_MOE,
        model_type="glm4v_moe_text",
        derive=glm_4v_moe,
        understands=_GLM_4_MOE.understands | SECTION_KEYS,
        defaults={
            **_GLM_4_MOE.defaults,
            "vocab_size": 151424,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "max_position_embeddings": 65536,
            "attention_bias": True,
        },
    ),
    "paddleocr_vl_text": replace(
        _ERNIE,
        model_type="paddleocr_vl_text",
        parts={},
        derive=paddleocr_vl,
        understands=_ERNIE.understands | SECTION_KEYS,
        defaults={
            **_ERNIE.defaults,
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
        },
    ),
    "granite_docling_text": replace(
        _GRANITE,
        model_type="granite_docling_text",
        defaults={
            "vocab_size": 133800,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
            "bos_token_id": 100257,
            "eos_token_id": 100257,
        },
    ),
    "granite4_vision_text": replace(
        _GRANITE,
        model_type="granite4_vision_text",
        scales_images=False,  # what its layers add is no embedding
        defaults={
            **_GRANITE.defaults,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "deepseek_ocr2_text": replace(
        _DEEPSEEK,
        model_type="deepseek_ocr2_text",
        derive=deepseek_ocr_2,
        supported={**_DEEPSEEK.supported, "topk_method": (None, "greedy")},
        understands=_DEEPSEEK.understands | {"n_group", "topk_group"},  # which greedy choice leaves out
        defaults={
            **_DEEPSEEK.defaults,
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
        },
    ),
}
