"""HYBRIDS: architectures of GGUF files with recurrent layers, as config.json describes them."""

from __future__ import annotations

from typing import Any

from flambeau.llm.checkpoints.gguf_parts import (
    SIGMOID,
    ToConfig,
    check_gates,
    experts,
    has_tensor,
    ignore,
    latent_sizes,
    num_dense_layers,
    num_layers,
    required,
    scalar,
)
from flambeau.llm.checkpoints.gguf_recurrent import recurrent_layers
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader

MAMBA_KEYS = {"conv_kernel": "conv_kernel", "state_size": "state_size"}  # GGUF's names → those of Mamba's config.json
HYBRID_KEYS = {"conv_kernel": "mamba_d_conv", "state_size": "mamba_d_state", "group_count": "mamba_n_groups"}
SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")  # of Granite
DELTA_NET_KEYS = {
    "conv_kernel": "linear_conv_kernel_dim",
    "state_size": "linear_key_head_dim",
    "group_count": "linear_num_key_heads",
    "time_step_rank": "linear_num_value_heads",
}


def state_space(header: GgufHeader, keys: dict[str, str]) -> dict[str, Any]:
    """The sizes of recurrent layers."""
    return {ours: header.get(f"ssm.{key}") for key, ours in keys.items()}


def layer_types(header: GgufHeader, recurrent: str) -> list[str]:
    """The kind of each layer; those without attention have a recurrence of this kind."""
    ignore(header, "attention.recurrent_layers", "full_attention_interval")  # the tensors tell
    found = recurrent_layers(header)
    return [recurrent if i in found else "full_attention" for i in range(num_layers(header))]


def mamba(header: GgufHeader) -> dict[str, Any]:
    """Mamba 1; Falcon Mamba has norms in its layers."""
    ignore(header, "attention.head_count", "attention.head_count_kv", "feed_forward_length")
    has_norms = bool(header.get("ssm.dt_b_c_rms"))
    return {
        "architectures": ["FalconMambaForCausalLM" if has_norms else "MambaForCausalLM"],
        **state_space(header, {**MAMBA_KEYS, "time_step_rank": "time_step_rank"}),
        "expand": inner_size(header) // required(header, "embedding_length"),
        "use_bias": "blk.0.ssm_in.bias" in header.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in header.tensors,
    }


def mamba_2(header: GgufHeader) -> dict[str, Any]:
    ignore(header, "attention.head_count", "attention.head_count_kv", "feed_forward_length")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        **state_space(header, {**MAMBA_KEYS, "group_count": "n_groups", "time_step_rank": "num_heads"}),
        "expand": inner_size(header) // required(header, "embedding_length"),
        "head_dim": inner_size(header, "ssm.time_step_rank") // header.get("ssm.time_step_rank"),
        "use_bias": "blk.0.ssm_in.bias" in header.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in header.tensors,
    }


def inner_size(header: GgufHeader, key: str = "embedding_length") -> int:
    """The channels of a recurrence, which are a multiple of another number."""
    size, divisor = required(header, "ssm.inner_size"), required(header, key)
    if not divisor or size % divisor:
        raise CheckpointError(f"{header.path} has ssm.inner_size {size}, which is no multiple of {key}, {divisor}")
    return size


def hybrid_mamba_2(header: GgufHeader) -> dict[str, Any]:
    """Mamba 2 by the names of hybrid models."""
    inner, heads = inner_size(header, "ssm.time_step_rank"), header.get("ssm.time_step_rank")
    first = min(recurrent_layers(header), default=0)
    return {
        **state_space(header, HYBRID_KEYS),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_ssm": inner,
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in header.tensors,
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in header.tensors,
    }


def jamba(header: GgufHeader) -> dict[str, Any]:
    """Layers with attention, and with experts, come at regular distances."""
    count, num_experts = required(header, "block_count"), header.get("expert_count")
    attending = frozenset(range(count)) - recurrent_layers(header)
    sparse = frozenset(i for i in range(count) if f"blk.{i}.ffn_gate_inp.weight" in header.tensors)
    period, offset = distance(header, attending, "with attention")
    sparse_period, sparse_offset = distance(header, sparse, "with experts")
    first = min(recurrent_layers(header), default=0)
    return {
        "architectures": ["JambaForCausalLM"],
        **state_space(header, {"conv_kernel": "mamba_d_conv", "state_size": "mamba_d_state"}),
        "mamba_expand": inner_size(header) // header.get("embedding_length"),
        "mamba_dt_rank": header.get("ssm.time_step_rank"),
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in header.tensors,
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in header.tensors,
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_experts": num_experts if sparse else 1,
        "expert_layer_period": sparse_period,
        "expert_layer_offset": sparse_offset,
    }


def distance(header: GgufHeader, layers: frozenset[int], what: str) -> tuple[int, int]:
    """How far layers are from each other, and the first of them."""
    count = required(header, "block_count")
    if not layers:
        return count + 1, count  # there are none
    found = sorted(layers)
    period = found[1] - found[0] if len(found) > 1 else max(count, found[0] + 1)
    if frozenset(range(found[0], count, period)) != layers or found[0] >= period:
        raise CheckpointError(f"{header.path} has layers {what} at changing distances, which is not supported")
    return period, found[0]


def lfm_2(header: GgufHeader) -> dict[str, Any]:
    first = min(recurrent_layers(header), default=0)
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": layer_types(header, "conv"),
        "conv_L_cache": header.get("shortconv.l_cache"),
        "conv_bias": f"blk.{first}.shortconv.in_proj.bias" in header.tensors,
        "block_auto_adjust_ff_dim": False,
    }


def lfm_2_moe(header: GgufHeader) -> dict[str, Any]:
    ignore(header, "expert_gating_func")
    return {
        **lfm_2(header),
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_experts": header.get("expert_count"),
        "num_dense_layers": num_dense_layers(header),
        "norm_topk_prob": bool(header.get("expert_weights_norm", True)),
        "routed_scaling_factor": header.get("expert_weights_scale", 1.0),
    }


def granite_hybrid(header: GgufHeader) -> dict[str, Any]:
    """Granite 4; Bamba, which is converted to it too, has none of its scales."""
    is_rotated = bool(header.get("rope.scaling.finetuned", True))
    if not any(header.get(key) for key in SCALES):
        return bamba(header, is_rotated=is_rotated)
    count = header.get("expert_count") or 0
    shared = header.get("expert_shared_feed_forward_length") or header.get("feed_forward_length")
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **hybrid_mamba_2(header),
        "layer_types": layer_types(header, "mamba"),
        "position_embedding_type": "rope" if is_rotated else "nope",
        "num_local_experts": count,
        "shared_intermediate_size": shared,
        "shared_expert_intermediate_size": None,
    }


def bamba(header: GgufHeader, *, is_rotated: bool) -> dict[str, Any]:
    size = required(header, "embedding_length") // (scalar(header, "attention.head_count") or 1)
    rotated = header.get("rope.dimension_count")
    if not is_rotated or rotated != size // 2 or header.get("expert_count"):
        raise CheckpointError(
            f"{header.path} has the scales of neither Granite nor Bamba, whose heads of {size} are rotated by half; "
            f"{rotated} is not supported"
        )
    recurrent = recurrent_layers(header)
    return {
        "architectures": ["BambaForCausalLM"],
        **hybrid_mamba_2(header),
        "attn_layer_indices": [i for i in range(num_layers(header)) if i not in recurrent],
        "num_experts_per_tok": None,
    }


def falcon_h1(header: GgufHeader) -> dict[str, Any]:
    """All its factors are multiplied into the weights."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **hybrid_mamba_2(header),
        "mamba_rms_norm": has_tensor(header, ".ssm_norm."),
        "mamba_norm_before_gate": False,
    }


def nemotron_h(header: GgufHeader) -> dict[str, Any]:
    """Each layer has one part: a recurrence, attention, a feed-forward layer or experts."""
    ignore(header, "rope.dimension_count", "expert_shared_count", "expert_gating_func", "feed_forward_length")
    recurrent = recurrent_layers(header)
    kinds = {".ffn_gate_inp.weight": "moe", ".ffn_up.weight": "mlp", ".attn_output.weight": "attention"}
    types = []
    for i in range(num_layers(header)):
        named = next((kind for end, kind in kinds.items() if f"blk.{i}{end}" in header.tensors), None)
        types.append("mamba" if i in recurrent else named)
    if None in types:
        raise CheckpointError(f"layer {types.index(None)} of {header.path} has no known part")
    found = {
        "architectures": ["NemotronHForCausalLM"],
        **hybrid_mamba_2(header),
        "layers_block_type": types,
        "intermediate_size": scalar(header, "feed_forward_length") or None,
    }
    sparse = {
        "moe_latent_size": header.get("moe_latent_size") or None,
        "n_routed_experts": header.get("expert_count"),
        "moe_shared_expert_intermediate_size": header.get("expert_shared_feed_forward_length"),
        "shared_expert_intermediate_size": None,
        "n_group": header.get("expert_group_count", 1),
        "topk_group": header.get("expert_group_used_count", 1),
        "norm_topk_prob": bool(header.get("expert_weights_norm", True)),
        "routed_scaling_factor": header.get("expert_weights_scale", 1.0),
    }
    return found | (sparse if "moe" in types else {"shared_expert_intermediate_size": None})


def delta_net(name: str) -> ToConfig:
    """Gated delta nets between layers with attention."""

    def to_config(header: GgufHeader) -> dict[str, Any]:
        inner, heads = inner_size(header, "ssm.time_step_rank"), header.get("ssm.time_step_rank")
        ignore(header, "rope.dimension_sections")  # a text has one position in all of them
        experts = header.get("expert_count")
        return {
            "architectures": [name],
            **state_space(header, DELTA_NET_KEYS),
            "linear_value_head_dim": inner // heads,
            "layer_types": layer_types(header, "linear_attention"),
            "num_hidden_layers": num_layers(header),
            **({"num_experts": experts} if experts else {}),
        }

    return to_config


def kimi_linear(header: GgufHeader) -> dict[str, Any]:
    """Delta attention, and latent attention without positions."""
    check_gates(header, SIGMOID)
    layers, size = recurrent_layers(header), required(header, "kda.head_dim")
    first = f"blk.{min(layers, default=0)}.ssm_f_b.weight"
    if first not in header.tensors:
        raise CheckpointError(f"{header.path} has no {first}; download it again")
    found = {key: value for key, value in experts(header).items() if key != "num_nextn_predict_layers"}
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
        **found,
        **latent_sizes(header),
        "norm_topk_prob": True,  # which files leave out
        "rope_parameters": None,
        "layer_types": layer_types(header, "linear_attention"),
        "linear_head_dim": size,
        "linear_num_heads": header.tensors[first].shape[0] // size,
        "linear_conv_kernel_dim": header.get("ssm.conv_kernel"),
    }


HYBRIDS: dict[str, ToConfig] = {
    "mamba": mamba,
    "mamba2": mamba_2,
    "jamba": jamba,
    "lfm2": lfm_2,
    "lfm2moe": lfm_2_moe,
    "granitehybrid": granite_hybrid,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "kimi-linear": kimi_linear,
    "qwen3next": delta_net("Qwen3NextForCausalLM"),
    "qwen35": delta_net("Qwen3_5ForCausalLM"),
    "qwen35moe": delta_net("Qwen3_5MoeForCausalLM"),
}
