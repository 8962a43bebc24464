"""MiMo V2, Step, LongCat and MiniMax M3 as they are published: names and keys of their files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.mtp_weights import read_mtp
from flambeau.llm.errors import CheckpointError, InvalidConfig, LLMError
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.proposers import tell_of_mtp
from support.checkpoints import VOCAB_SIZE, class_of, config_of, import_transformers, random_weights, write_checkpoint
from unit.llm.checkpoints.test_fp8 import blocks
from unit.llm.models.families.test_llama_like import TOLERANCE, expected_logits, found_logits

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
LLAMA_3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PICTURES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PUBLISHED: dict[str, dict[str, Any]] = {
    "MiMo-V2-Flash": {
        **SIZES,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_chunk_size": 8,
        "attention_value_scale": 0.6,
        "head_dim": 24,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "intermediate_size": 56,
        "layernorm_epsilon": 1e-5,
        "moe_intermediate_size": 24,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "n_routed_experts": 4,
        "n_shared_experts": None,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5000000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 8,
        "sliding_window_size": 8,
        "swa_head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 16,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    },
    "Step-3.7-Flash": {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "text_config": {
            **SIZES,
            "model_type": "step3p5",
            "att_impl_type": "GQA",
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 6,
                "num_attention_groups": 2,
                "head_dim": 16,
                "true_head_dim": 16,
            },
            "head_dim": 16,
            "intermediate_size": 56,
            "layer_types": ["full_attention", *["sliding_attention"] * 4],
            "moe_intermediate_size": 24,
            "moe_layers_enum": "1,2",
            "moe_num_experts": 4,
            "moe_router_activation": "sigmoid",
            "moe_router_scaling_factor": 3.0,
            "moe_top_k": 2,
            "need_fp32_gate": True,
            "norm_expert_weight": True,
            "num_attention_groups": 2,
            "num_hidden_layers": 3,
            "num_nextn_predict_layers": 2,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0],
            "rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 16},
            "rope_theta": [50000.0, 1000.0, 1000.0, 1000.0, 1000.0],
            "share_expert_dim": 24,
            "sliding_window": 9,
            "swiglu_limits": [0.0, 0.0, 0.4, 0.0, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.3, 0.0, 0.0],
            "use_head_wise_attn_gate": True,
            "use_moe_router_bias": True,
            "use_qk_norm": True,
            "yarn_only_types": ["full_attention"],
            "zero_centered": True,
        },
        "vision_config": {**PICTURES, "mlp_ratio": 1.0},
    },
    "LongCat-Flash-Chat": {
        **SIZES,
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "attention_bias": False,
        "attention_method": "MLA",
        "expert_ffn_hidden_size": 24,
        "ffn_hidden_size": 56,
        "head_dim": 8,  # of transformers, whose default is qk_rope_head_dim of the published model
        "kv_lora_rank": 24,
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "moe_topk": 3,
        "n_routed_experts": 4,
        "num_layers": 1,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "routed_scaling_factor": 6.0,
        "router_bias": False,
        "v_head_dim": 10,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
    },
    "dots3-note-prev": {
        **SIZES,
        "architectures": ["Dots3NoteForConditionalGeneration"],
        "model_type": "dots3_note",
        "first_k_dense_replace": 1,
        "head_dim": 20,
        "index_head_dim": 12,
        "index_n_heads": 16,
        "index_topk": 9,
        "intermediate_size": 56,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 24,
        "moe_layer_freq": [0, 1, 1, 0],
        "moe_shared_expert_intermediate_size": 40,
        "n_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "rope_theta": 40000.0,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "sliding_window_size": 7,
        "swa_head_dim": 24,
        "swa_kv_lora_rank": 40,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 28,
        "swa_qk_nope_head_dim": 16,
        "swa_rope_theta": 5000.0,
        "swa_v_head_dim": 14,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "use_dsa": True,
        "use_sliding_window": True,
        "v_head_dim": 10,
        "vision_config": {
            **PICTURES,
            "intermediate_size": 24,
            "pyramid_num_routed": [-1],
            "adapter_in_dim": 16,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "downsample_hidden_size": 8,
            "feature_size": 8,
            "adapter_input_size": 16,
            "adapter_out_dim": 32,
        },
    },
    "MiniMax-M3": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": {
            **SIZES,
            "dense_intermediate_size": 56,
            "head_dim": 16,
            "hidden_act": "swigluoai",
            "intermediate_size": 24,
            "model_type": "minimax_m3_vl_text",
            "moe_layer_freq": [0, 1],
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_mtp_modules": 1,
            "partial_rotary_factor": 0.5,
            "rope_theta": 5000000,
            "rotary_dim": 8,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 24,
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 1],
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 12,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "use_sparse_attention": True,
            },
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
        "vision_config": {**PICTURES, "intermediate_size": 24},
        "projector_hidden_size": 32,
    },
}


CONFIGS = {"dots3-note-prev": "Dots3NoteConfig"}  # of models that older versions of transformers lack


def write_network(folder: Path, name: str) -> Any:
    """A checkpoint with the published keys and names, and the network of transformers for them."""
    transformers = import_transformers()
    class_of(transformers, CONFIGS.get(name, "PreTrainedConfig"))
    file = folder / "config.json"
    file.write_text(json.dumps(PUBLISHED[name]))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    has_pictures = "vision_config" in PUBLISHED[name]
    kind = transformers.AutoModelForImageTextToText if has_pictures else transformers.AutoModelForCausalLM
    reference = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    random_weights(reference.eval().requires_grad_(False), middle=0.0 if has_pictures else 1.0)
    reference.save_pretrained(folder)
    file.write_text(json.dumps(PUBLISHED[name]))
    return reference


@pytest.mark.parametrize("name", PUBLISHED)
def test_network_with_published_keys_is_that_of_transformers(tmp_path, name):
    reference = write_network(tmp_path, name)
    file = tmp_path / "model.safetensors"
    further = {"model.mtp.layers.0.eh_proj.weight": torch.ones(2)} if name != "Step-3.7-Flash" else {}
    save_file({**load_file(file), **further}, file)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    assert read_architecture(tmp_path).unknown_keys == ()


def test_limits_of_activations_have_an_effect(tmp_path):
    write_checkpoint(tmp_path, "step-3.7")
    expected = found_logits(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        file.write_text(json.dumps({**config, "text_config": {**config["text_config"], key: None}}))
        assert (found_logits(tmp_path) - expected).abs().max() > 0.01, key


def test_stacks_of_experts_in_fp8_have_scales_of_blocks(tmp_path):
    write_checkpoint(tmp_path, "step-3.7")
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, config = load_file(file), json.loads(settings.read_text())
    packed = dict(tensors)
    for name in [name for name in tensors if ".moe." in name and tensors[name].dim() == 3]:
        parts, rounded = zip(*(blocks(one, 16) for one in tensors[name]), strict=True)
        tensors[name] = torch.stack(rounded)
        packed[name] = torch.stack([part["weight"] for part in parts])
        packed[f"{name}_scale_inv"] = torch.stack([part["weight_scale_inv"] for part in parts])
    save_file(tensors, file)
    expected = found_logits(tmp_path)
    save_file(packed, file)
    settings.write_text(json.dumps(config | {"quantization_config": FP8}))
    assert torch.equal(found_logits(tmp_path), expected)
    kept = load_model(tmp_path, forms=KeptForms(blocks=True)).model.layers[1].mlp.experts
    assert dict(kept.down_proj.named_buffers())["weight"].dtype == torch.float8_e4m3fn


def test_layers_of_multi_token_prediction_of_step_are_left_out_with_a_warning(tmp_path, caplog):
    write_network(tmp_path, "Step-3.7-Flash")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.3.eh_proj.weight": torch.ones(2)}, file)
    model = load_model(tmp_path)
    tell_of_mtp(tmp_path, model.arch)
    assert "another form, which is left out: model.layers.3.eh_proj.weight" in caplog.text
    with pytest.raises(LLMError, match="none that is known"):
        read_mtp(tmp_path, model.arch)


REFUSED: list[tuple[str, str, Any]] = [
    ("MiMo-V2-Flash", "add_full_attention_sink_bias", True),
    ("MiMo-V2-Flash", "swa_v_head_dim", 12),
    ("MiMo-V2-Flash", "n_shared_experts", 1),
    ("LongCat-Flash-Chat", "zero_expert_type", "zero"),
    ("LongCat-Flash-Chat", "router_bias", True),
    ("LongCat-Flash-Chat", "q_lora_rank", None),
    ("LongCat-Flash-Chat", "attention_method", "MHA"),
    ("Step-3.7-Flash", "yarn_only_types", ["sliding_attention"]),
    ("Step-3.7-Flash", "rope_theta", [50000.0, 1000.0, 2000.0, 1000.0, 1000.0]),
    ("Step-3.7-Flash", "attention_other_setting", {"num_attention_heads": 6, "num_attention_groups": 4}),
    ("Step-3.7-Flash", "zero_centered", False),
    ("Step-3.7-Flash", "moe_every_n_layer", 2),
    ("dots3-note-prev", "mlp_bias", True),
    ("dots3-note-prev", "q_lora_rank", None),
    ("dots3-note-prev", "num_key_value_heads", 2),
    ("dots3-note-prev", "index_head_dim", 6),
    ("dots3-note-prev", "layer_types", ["linear_attention"] * 4),
    ("dots3-note-prev", "per_layer_config", {"0": {"hidden_act": "gelu"}}),
    ("dots3-note-prev", "per_layer_config", {"0": {"qk_rope_head_dim": 6}}),
    ("MiniMax-M3", "rotary_dim", 16),
    ("MiniMax-M3", "index_n_heads", 1),
]


@pytest.mark.parametrize(("name", "key", "value"), REFUSED)
def test_value_that_is_not_supported_is_refused_by_name(name, key, value):
    config = PUBLISHED[name]
    if "text_config" in config:
        text = {**config["text_config"], key: value}
        if key == "index_n_heads":
            text["sparse_attention_config"] = {**text["sparse_attention_config"], "sparse_num_index_heads": value}
        config = {**config, "text_config": text}
    else:
        config = {**config, key: value}
    with pytest.raises(CheckpointError, match=key):
        from_hugging_face(config)


MALFORMED: list[tuple[str, str, Any, str]] = [
    ("mimo-v2", "num_hidden_layers", None, "mimo_v2_flash needs num_hidden_layers"),
    ("mimo-v2", "routed_scaling_factor", "zzz", "a value that no mimo_v2_flash has"),
    ("mimo-v2", "layer_types", 3, "a value that no mimo_v2_flash has"),
    ("deepseek-v4", "compress_rates", 3, "a value that no deepseek_v4 has"),
    ("step-3.7", "text_config", 3, "3 for text_config, which must be an object"),
    ("rwkv", "num_hidden_layers", None, "rwkv needs num_hidden_layers"),
]


@pytest.mark.parametrize(("kind", "key", "value", "message"), MALFORMED)
def test_a_key_that_is_missing_or_has_no_meaning_is_an_invalid_config(kind, key, value, message):
    config = {name: given for name, given in config_of(kind).items() if name != key}
    with pytest.raises(InvalidConfig, match=message):
        from_hugging_face(config if value is None else {**config, key: value})


def test_scaling_beside_the_rope_parameters_of_step_is_not_left_out():
    config = config_of("step-3.7")
    text = {**config["text_config"], "rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 16}}
    with pytest.raises(LLMError, match="rope_scaling replaces rope_parameters"):
        from_hugging_face({**config, "text_config": text})


def test_unknown_keys_of_sparse_attention_are_named():
    config = config_of("minimax-m3") | {"sparse_attention_config": {"sparse_new": 3}}
    assert from_hugging_face(config).unknown_keys == ("sparse_attention_config.sparse_new",)
    with pytest.raises(CheckpointError, match="sparse_init_block 2"):
        from_hugging_face(config_of("minimax-m3") | {"sparse_attention_config": {"sparse_init_block": 2}})
