"""What llama.cpp's converter writes for networks of transformers: the values of the header, and tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from support.gguf_files import by_pairs

BY_PAIRS = (
    "arcee",
    "granite",
    "granitemoe",
    "granitehybrid",
    "olmo",
    "internlm2",
    "mistral3",
    "minicpm",
    "xverse",
    "baichuan",
)
MAMBA_1 = ("mamba", "jamba")
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
HEAD_NORM = re.compile(r"^(.*_layernorm)\.norms\.(\d+)\.weight$")
STREAM = re.compile(r"^(model\.altup_(?:unembed_)?projections)\.(\d+)\.weight$")
EXPERT = re.compile(r"^(.*experts)\.(\d+)\.(\w+)\.weight$")


def header_of(config: Any, **more: Any) -> dict[str, Any]:
    """The header's values of a model of transformers."""
    if config.model_type == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    rms = getattr(config, "rms_norm_eps", None)
    layer = next((v for k in EPSILONS if (v := getattr(config, k, None)) is not None), 1e-5)
    is_rms = rms is not None or config.model_type in ("mamba", "mamba2", "falcon_mamba", "lfm2", "lfm2_moe")
    given = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + more.get("nextn_predict_layers", 0),
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": getattr(config, "num_attention_heads", 0),
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None)
        or getattr(config, "num_attention_heads", 0),
        f"attention.layer_norm_{'rms_' if is_rms else ''}epsilon": rms or layer,
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
    has_size = "expert_feed_forward_length" in more or "moe" in config.model_type or config.model_type == "jamba"
    if "expert_used_count" in more and not has_size:
        given["expert_feed_forward_length"] = config.intermediate_size
    return {**given, **more}


def converted(model: Any, folder: Path, architecture: str) -> dict[str, Tensor]:
    """The weights as the converter writes them, by the names that the package knows."""
    model.save_pretrained(folder)
    config, stored, stacks = model.config, load_file(folder / "model.safetensors"), {}
    found = {}
    for name, tensor in stored.items():
        if (one := HEAD_NORM.match(name)) or (one := STREAM.match(name)):
            stacks.setdefault(f"{one[1]}.weight", {})[int(one[2])] = tensor
        elif one := EXPERT.match(name):
            stacks.setdefault(stack_name(one), {})[int(one[2])] = tensor
        else:
            found |= arranged(name, tensor, config, architecture)
    return found | {name: torch.stack([one for _, one in sorted(parts.items())]) for name, parts in stacks.items()}


def stack_name(one: re.Match[str]) -> str:
    """The name of all experts of a layer; the package does not know all."""
    kinds = {"w1": "gate", "w2": "down", "w3": "up", "up_proj": "up", "down_proj": "down"}
    if ".feed_forward." in one[1] or ".mixer." in one[1]:
        return f"blk.{one[1].split('.')[2]}.ffn_{kinds.get(one[3], 'gate')}_exps.weight"
    return f"{one[1]}.{one[3]}.weight"


def arranged(name: str, tensor: Tensor, config: Any, architecture: str) -> dict[str, Tensor]:
    """One tensor as the files of an architecture have it."""
    heads, start = getattr(config, "num_attention_heads", 0), name.rpartition(".")[0]
    if architecture == "kimi-linear" and (found := kimi_layer(name, tensor)) is not None:
        return found
    if architecture == "gemma3n":
        name = f"{name}.weight" if name.endswith("_scale") else name
    if architecture == "mistral4" and re.search(r"\.experts\.(gate_up|down)_proj$", name):
        return {f"{name}.weight": tensor}
    if name.endswith("_sub_norm.weight"):  # which the package does not know by this name
        return {f"blk.{name.split('.')[2]}.{name.split('.')[4]}.weight": tensor}
    if architecture == "gemma4" and (found := gemma_4_layer(name, tensor)) is not None:
        return found
    if (found := recurrent(name, tensor, config, architecture)) is not None:
        return found
    if ".q_proj." in name and architecture in BY_PAIRS:
        return {name: by_pairs(tensor, heads)}
    if ".k_proj." in name and architecture in BY_PAIRS:
        return {name: by_pairs(tensor, config.num_key_value_heads)}
    if architecture == "nemotron" and "norm" in name and name.endswith("weight"):
        return {name: tensor + 1}
    if ".kv_b_proj." in name and architecture in ("deepseek2", "mistral4", "glm-dsa", "kimi-linear"):
        keys, values = tensor.view(heads, -1, tensor.shape[1]).split([12, 10], dim=1)
        start = start.removesuffix("kv_b_proj")
        return {f"{start}k_b_proj.weight": keys.transpose(1, 2), f"{start}v_b_proj.weight": values}
    if name.endswith(("e_score_correction_bias", "moe_statics.e_score_correction_bias")):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}
    if name.endswith(".sinks"):
        return {f"{name}.weight": tensor}
    if re.search(r"\.experts\.(gate_up|down)_proj|\.(in|out)put_linear\.", name):
        return stacked(name, tensor, architecture, has_experts=getattr(config, "num_local_experts", 1) > 0)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return {name: tensor.t()}
    if architecture == "bloom":
        name = name.removeprefix("transformer.")  # the package knows both, but not for all tensors
    if ".query_key_value." in name and architecture == "falcon":  # queries of a key-value head, its key and its value
        groups = tensor.unflatten(0, (config.num_kv_heads, -1, config.hidden_size // heads))
        return {name: torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])}
    if ".query_key_value." in name:  # queries, keys and values of a head lie side by side
        rows = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1)
        return {name: rows.reshape(tensor.shape)}
    return {name: tensor}


def recurrent(name: str, tensor: Tensor, config: Any, architecture: str) -> dict[str, Tensor] | None:
    """A tensor of a recurrent layer, or one that is arranged otherwise in files of networks that have such layers."""
    if architecture == "falcon-h1":
        name, tensor = name, tensor * falcon_h1_factor(name, config)
    if architecture in DELTA_NETS and name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: tensor + 1}
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        tensor = tensor.squeeze(1)
    elif name.endswith(".A_log"):
        tensor = -tensor.exp()
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith(".expert_bias"):
        return {name.replace(".expert_bias", ".expert_bias.bias"): tensor}
    elif not re.search(r"\.(mamba|mixer|linear_attn|conv)\.", name):
        return {name: tensor} if architecture == "falcon-h1" else None
    if architecture == "qwen3next" and ".in_proj_qkvz." in name:
        return ungrouped(name, tensor, config)
    if architecture in ("qwen35", "qwen35moe"):
        return {name: tiled(name, tensor, config)}
    if name.endswith((".A_log", ".D")) and architecture not in (*MAMBA_1, *DELTA_NETS):
        tensor = tensor.unsqueeze(-1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        groups = next(value for key in ("n_groups", "mamba_n_groups") if (value := getattr(config, key, None)))
        tensor = tensor.view(groups, -1)
    if architecture.startswith("nemotron_h") and re.search(r"\.mixer\.(experts|gate|shared_experts)\b", name):
        return None
    return {
        name.replace("model.layers.", "backbone.layers.") if architecture.startswith("nemotron_h") else name: tensor
    }


def kimi_layer(name: str, tensor: Tensor) -> dict[str, Tensor] | None:
    """A tensor of a layer with delta attention."""
    if name.endswith("_conv1d.weight"):
        return {name: tensor.reshape(1, -1, 1, tensor.shape[-1])}
    if name.endswith(".A_log"):
        return {name: -tensor.exp()}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}
    return None


def gemma_4_layer(name: str, tensor: Tensor) -> dict[str, Tensor] | None:
    """Factors of experts, of what chooses them and of a whole layer."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if name.endswith("router.scale"):
        return {f"blk.{layer[1]}.ffn_gate_inp.scale": tensor}
    if name.endswith("per_expert_scale"):
        return {f"blk.{layer[1]}.ffn_down_exps.scale": tensor}
    ends = (".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")
    return {f"{name}.weight": tensor} if name.endswith(ends) else None


def falcon_h1_factor(name: str, config: Any) -> Any:
    """What the converter multiplies weights of Falcon H1 with."""
    gate, down = config.mlp_multipliers or (1.0, 1.0)
    inputs = config.attention_in_multiplier
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * inputs,
        "q_proj": inputs,
        "v_proj": inputs,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if ".in_proj." in name:
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads])
        parts = torch.tensor(config.ssm_multipliers or [1.0] * 5).repeat_interleave(sizes)
        return config.ssm_in_multiplier * parts.unsqueeze(1)
    return factors.get(name.split(".")[-2], 1.0)


def ungrouped(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """Queries, keys, values and gates one after the other, instead of by key head."""
    shared = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, shared, shared]
    parts = tensor.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)
    q, k, v, gate = (part.flatten(0, 1) for part in parts)
    start = f"blk.{name.split('.')[2]}"
    return {f"{start}.attn_qkv.weight": torch.cat((q, k, v)), f"{start}.attn_gate.weight": gate}


def tiled(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Value heads of Qwen 3.5: the first of each key head, then the second of each, and so on."""
    keys, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    if name.endswith("norm.weight"):
        return tensor
    if name.endswith(".out_proj.weight"):
        return tiled("", tensor.t(), config).t()
    if ".in_proj_qkv." in name or ".conv1d." in name:
        values = tensor[-heads * size :]
        return torch.cat((tensor[: -heads * size], tiled("", values, config)))
    return tensor.unflatten(0, (keys, heads // keys, -1)).transpose(0, 1).reshape(tensor.shape)


def stacked(name: str, tensor: Tensor, architecture: str, *, has_experts: bool) -> dict[str, Tensor]:
    """Experts whose gates are in one tensor with the rest, in one of three arrangements."""
    start, _, leaf = name.rpartition(".")
    if architecture.startswith("granite"):
        mlp = ".mlp.shared_experts" if has_experts else ".mlp"
        if ".output_linear" in name:
            return {name.replace(".shared_mlp.output_linear", f"{mlp}.down_proj"): tensor}
        prefix, (gate, up) = name.split(".input_linear")[0], tensor.chunk(2, dim=-2)
        if "shared_mlp" in name:
            prefix = prefix.replace(".shared_mlp", mlp)
            return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        return {f"{prefix}.experts.gate.weight": gate, f"{prefix}.experts.up.weight": up}
    kind = "bias" if leaf.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.transpose(-1, -2)
    if leaf.startswith("down_proj"):
        return {f"{start}.down_proj.{kind}": tensor}
    alternates = architecture == "gpt-oss"
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if alternates else tensor.chunk(2, dim=1)
    return {f"{start}.gate_proj.{kind}": gate, f"{start}.up_proj.{kind}": up}


def positions_of(model: Any, architecture: str) -> dict[str, Tensor]:
    """Divisors of frequencies: of Llama 3, or of the parts of Gemma 4's heads that are not rotated."""
    if architecture == "gemma4":
        return {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)}
    if architecture == "apertus":
        plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        return {"rope_freqs.weight": plain / model.model.rotary_emb.inv_freq}
    return {}


def without_activations(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """The tensors of Apertus without those of its activation, which are in the header."""
    values = {}
    for name, value in tensors.items():
        if ".act_fn." in name:
            values.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(value.float().item())
    return {name: value for name, value in tensors.items() if ".act_fn." not in name}, values


def factors(model: Any, name: str) -> Tensor:
    """Those of longrope: `long` or `short`."""
    return torch.tensor(model.config.rope_parameters[f"{name}_factor"])
