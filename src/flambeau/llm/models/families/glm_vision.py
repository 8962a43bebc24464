"""The decoders of GLM-4.1V, 4.5V and 4.6V: those of GLM-4, rotated by the rows and columns of images."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.models.families.config_parts import partial_rotation
from flambeau.llm.models.families.experts import EXPERTS, glm_4_moe
from flambeau.llm.models.families.family import Config
from flambeau.llm.models.families.llama_like import LLAMA_LIKE
from flambeau.llm.models.families.qwen_vl import SECTION_KEYS, one_after_another, pairs_of, sections

SECTIONS = (8, 12, 12)


def glm_4v(config: Config) -> Config:
    return {**partial_rotation(config), **axes(config)}


def glm_4v_moe(config: Config) -> Config:
    return {**glm_4_moe(config), **axes(config)}


def axes(config: Config) -> Config:
    """One section of the dimensions that are rotated after another."""
    num_pairs = (partial_rotation(config).get("rotary_size") or 2 * pairs_of(config)) // 2
    return {"position_axes": one_after_another(sections(config, SECTIONS, num_pairs, is_interleaved=False), num_pairs)}


_GLM_4, _GLM_4_MOE = LLAMA_LIKE["Glm4ForCausalLM"], EXPERTS["Glm4MoeForCausalLM"]
GLM_VISION = {  # by the model_type of their section
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
}
