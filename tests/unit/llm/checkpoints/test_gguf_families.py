"""GGUF files of many architectures give the networks that transformers has for the same weights.

The values of the headers are those that llama.cpp's converter writes for these networks.
"""

from __future__ import annotations

import re

import gguf
import pytest
import torch
from safetensors.torch import load_file

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.gguf_families import ARCHITECTURES
from flambeau.llm.errors import CheckpointError
from support.checkpoints import reference
from support.gguf_files import by_pairs, write_gguf

IDS = torch.tensor([[3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12, 77, 31, 8, 64]])
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
LATENT = {
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 10,
    "rope.dimension_count": 8,
}
DEEPSEEK = {
    **LATENT,
    **YARN,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.7,
}
MSCALES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GLM_EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "nextn_predict_layers": 1,
}
SCALES = {"attention.scale": 0.2, "embedding_scale": 6.0, "residual_scale": 1.0, "logit_scale": 1.0}
WINDOWS = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]}
HALF = {"rope.dimension_count": 4}
KINDS = {
    "gpt-oss": ("gpt-oss", {**YARN, "expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 9}),
    "deepseek-v2": ("deepseek2", {**DEEPSEEK, "rope.scaling.yarn_log_multiplier": 0.09}),
    "deepseek-v3": (
        "deepseek2",
        {**DEEPSEEK, "expert_weights_norm": True, "rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "youtu": ("deepseek2", {**LATENT, "leading_dense_block_count": 2, "expert_shared_count": 0}),
    "minicpm-3": (
        "minicpm3",
        {
            "attention.q_lora_rank": 20,
            "attention.kv_lora_rank": 24,
            "attention.key_length": 20,
            "rope.dimension_count": 8,
        },
    ),
    "glm-4.5": ("glm4moe", {**GLM_EXPERTS, "rope.dimension_count": 8}),
    "glm-4": ("glm4", {"rope.dimension_count": 8}),
    "cohere": ("command-r", {"logit_scale": 0.5, "rope.scaling.type": "none"}),
    "cohere-qk-norm": ("command-r", {"logit_scale": 0.0625, "rope.scaling.type": "none"}),
    "cohere-2": ("cohere2", {"logit_scale": 0.0625, "attention.sliding_window": 9}),
    "starcoder-2": ("starcoder2", {}),
    "stable-lm": ("stablelm", {**HALF, "use_parallel_residual": False}),
    "phi-2": ("phi2", HALF),
    "phi-4-mini": ("phi3", {**HALF, "rope.scaling.original_context_length": 4096, "attention.sliding_window": 0}),
    "nemotron": ("nemotron", {**HALF, "attention.layer_norm_rms_epsilon": 1e-5}),
    "olmo": ("olmo", {"attention.clamp_kqv": 0.8}),
    "olmoe": ("olmoe", {"expert_count": 6, "expert_used_count": 3}),
    "olmo-3": ("olmo2", {**WINDOWS, "rope.freq_base_swa": 5e5}),
    "granite-moe": ("granitemoe", {**SCALES, "expert_count": 4, "expert_used_count": 2}),
    "granite-moe-shared": (
        "granitemoe",
        {
            **dict.fromkeys(SCALES, 1.0),
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 24,
        },
    ),
    "seed-oss": ("seed_oss", {}),
    "ernie-4.5": ("ernie4_5", {}),
    "ernie-4.5-moe": (
        "ernie4_5-moe",
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_feed_forward_length": 24,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 28,
        },
    ),
    "exaone-4": ("exaone4", WINDOWS),
    "hunyuan": ("hunyuan-dense", {}),
    "hunyuan-moe": (
        "hunyuan-moe",
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 56,
            "expert_shared_feed_forward_length": 56,
            "expert_shared_count": 1,
        },
    ),
    "dots-1": (
        "dots1",
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_feed_forward_length": 32,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": False,
        },
    ),
    "arcee": ("arcee", {"rope.dimension_count": 16}),
    "llama-4": (
        "llama4",
        {
            "expert_count": 4,
            "expert_used_count": 1,
            "interleave_moe_layer_step": 2,
            "feed_forward_length": 40,
            "expert_feed_forward_length": 64,
        },
    ),
    "minimax-m2": (
        "minimax-m2",
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 56,
            "rope.dimension_count": 8,
            "expert_gating_func": 2,
        },
    ),
    "llama-2": ("internlm2", {}),
    "gpt-2": ("gpt2", {}),
    "gpt-neox": ("gptneox", {**HALF, "use_parallel_residual": True}),
    "bloom": ("bloom", {}),
}
OPTIONS = {  # of the network, where GGUF files cannot say otherwise
    "gpt-oss": {"swiglu_limit": 7.0},
    "deepseek-v2": {"rope_parameters": {**MSCALES, "mscale": 0.9, "mscale_all_dim": 0.9}},
    "minicpm-3": {"scale_emb": 12, "dim_model_base": 256},
    "cohere-2": {"layer_types": None, "sliding_window_pattern": 4, "num_hidden_layers": 4},
    "starcoder-2": {"sliding_window": None},
    "phi-2": {"num_key_value_heads": 4},
    "olmoe": {"clip_qkv": None},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hunyuan-moe": {"moe_intermediate_size": 56, "num_shared_expert": 1},
    "dots-1": {"sliding_window": None},
    "llama-4": {
        "attention_chunk_size": 8192,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
}
BY_PAIRS = ("arcee", "granitemoe", "olmo", "internlm2")


def values_of(config, **more):
    """The header's values of a model of transformers."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    rms = getattr(config, "rms_norm_eps", None)
    layer = next((v for k in EPSILONS if (v := getattr(config, k, None)) is not None), 1e-5)
    given = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + more.get("nextn_predict_layers", 0),
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention.layer_norm_rms_epsilon" if rms is not None else "attention.layer_norm_epsilon": rms or layer,
        "context_length": getattr(config, "max_position_embeddings", 128),
        "vocab_size": config.vocab_size,
    }
    if "rope_theta" in rope:
        given["rope.freq_base"] = float(rope["rope_theta"])
    if getattr(config, "head_dim", None):
        given["attention.key_length"] = given["attention.value_length"] = config.head_dim
    if more.get("attention.kv_lora_rank") and "attention.value_length" not in more:
        del given["attention.value_length"]  # older converters do not write it
    if "attention.layer_norm_rms_epsilon" in more:
        given["attention.layer_norm_epsilon"] = layer
    if "expert_used_count" in more and "expert_feed_forward_length" not in more and "moe" not in config.model_type:
        given["expert_feed_forward_length"] = config.intermediate_size
    return {**given, **more}


EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
EXPERT = re.compile(r"^(.*experts)\.(\d+)\.(\w+)\.weight$")


def tensors_of(model, folder, architecture):
    """The weights as the converter writes them, by the names that the package knows."""
    model.save_pretrained(folder)
    config, stored, stacks = model.config, load_file(folder / "model.safetensors"), {}
    found = {}
    for name, tensor in stored.items():
        if one := EXPERT.match(name):
            stacks.setdefault(f"{one[1]}.{one[3]}.weight", {})[int(one[2])] = tensor
        else:
            found |= arranged(name, tensor, config, architecture)
    return found | {name: torch.stack([one for _, one in sorted(parts.items())]) for name, parts in stacks.items()}


def arranged(name, tensor, config, architecture):
    """One tensor as the files of an architecture have it."""
    heads, start = config.num_attention_heads, name.rpartition(".")[0]
    if ".q_proj." in name and architecture in BY_PAIRS:
        return {name: by_pairs(tensor, heads)}
    if ".k_proj." in name and architecture in BY_PAIRS:
        return {name: by_pairs(tensor, config.num_key_value_heads)}
    if architecture == "nemotron" and "norm" in name and name.endswith("weight"):
        return {name: tensor + 1}
    if ".kv_b_proj." in name and architecture == "deepseek2":
        keys, values = tensor.view(heads, -1, tensor.shape[1]).split([12, 10], dim=1)
        start = start.removesuffix("kv_b_proj")
        return {f"{start}k_b_proj.weight": keys.transpose(1, 2), f"{start}v_b_proj.weight": values}
    if name.endswith(("e_score_correction_bias", "moe_statics.e_score_correction_bias")):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}
    if name.endswith(".sinks"):
        return {f"{name}.weight": tensor}
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name or ".input_linear." in name:
        return stacked(name, tensor, architecture)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return {name: tensor.t()}
    if architecture == "bloom":
        name = name.removeprefix("transformer.")  # the package knows both, but not for all tensors
    if ".query_key_value." in name:  # queries, keys and values of a head lie side by side
        rows = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1)
        return {name: rows.reshape(tensor.shape)}
    return {name: tensor}


def stacked(name, tensor, architecture):
    """Experts whose gates are in one tensor with the rest, in one of three arrangements."""
    start, _, leaf = name.rpartition(".")
    if architecture == "granitemoe":
        prefix, (gate, up) = name.split(".input_linear")[0], tensor.chunk(2, dim=-2)
        if "shared_mlp" in name:
            prefix = prefix.replace(".shared_mlp", ".mlp.shared_experts")
            return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        return {f"{prefix}.experts.gate.weight": gate, f"{prefix}.experts.up.weight": up}
    kind = "bias" if leaf.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.transpose(-1, -2)
    if leaf.startswith("down_proj"):
        return {f"{start}.down_proj.{kind}": tensor}
    alternates = architecture == "gpt-oss"
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if alternates else tensor.chunk(2, dim=1)
    return {f"{start}.gate_proj.{kind}": gate, f"{start}.up_proj.{kind}": up}


def write(tmp_path, kind, quantized="F32"):
    architecture, values = KINDS[kind]
    model = reference(kind, **OPTIONS.get(kind, {}))
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    path = tmp_path / "gguf" / "model.gguf"
    return model, path, write_gguf(path, architecture, tensors, values_of(model.config, **values), quantized)


def logits_of(model):
    with torch.inference_mode():
        return model.logits(model(IDS[0], torch.arange(IDS.shape[1]), WholeAttention()))


@pytest.mark.parametrize("kind", KINDS)
def test_network_is_that_of_transformers(tmp_path, kind):
    model, path, _ = write(tmp_path, kind)
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
    assert read_architecture(path).unknown_keys == ()


def test_every_architecture_is_known_to_the_package():
    assert not ARCHITECTURES.keys() - set(gguf.MODEL_ARCH_NAMES.values())


def test_experts_in_mxfp4_are_dequantized(tmp_path, caplog):
    """As gpt-oss is published."""
    _, path, stored = write(tmp_path, "gpt-oss", lambda name: "MXFP4" if "experts" in name else "F32")
    experts = load_model(path, dtype=torch.float32).model.layers[1].mlp.experts
    start = "model.layers.1.mlp.experts"
    torch.testing.assert_close(experts.down_proj, stored[f"{start}.down_proj.weight"])
    gates = torch.cat([stored[f"{start}.{part}_proj.weight"] for part in ("gate", "up")], dim=1)
    torch.testing.assert_close(experts.gate_up_proj, gates)
    assert "stacks of experts are dequantized" in caplog.text


def test_keys_and_values_of_latents_belong_together(tmp_path):
    model = reference("deepseek-v3")
    architecture, values = KINDS["deepseek-v3"]
    tensors = tensors_of(model, tmp_path / "folder", architecture)
    del tensors["model.layers.1.self_attn.v_b_proj.weight"]
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, values_of(model.config, **values))
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k_b\.weight without a fitting blk\.1\.attn_v_b\.weight"):
        load_model(path)


def test_whole_latents_of_older_files_are_read(tmp_path):
    """Their sizes are those of single heads, and one tensor makes keys and values."""
    model = reference("deepseek-v3")
    architecture, values = KINDS["deepseek-v3"]
    tensors = tensors_of(model, tmp_path / "folder", "an older one")
    older = {key: value for key, value in values.items() if not key.endswith("_mla")}
    older |= {"attention.key_length": 20, "attention.value_length": 10}
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, values_of(model.config, **older))
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
