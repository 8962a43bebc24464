"""Zamba 2: Mamba 2 in every layer, and blocks of attention that some layers share."""

from __future__ import annotations

import math

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import LLAMA_TOKENS
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_types import RECURRENT_TYPES
from flambeau.llm.models.families.recurrence import Recurrence


def zamba_2(config: Config) -> Config:
    num_layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    layers = block_layers(config)
    size = 2 * hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if kv_heads != heads:  # adapters of keys and values have as many outputs as those of queries
        raise CheckpointError(f"num_key_value_heads {kv_heads} is not supported here; supported is {heads}")
    everywhere = frozenset(range(num_layers))
    return {
        "recurrence": zamba_recurrence(config, everywhere),
        "has_mlp": False,
        "block_layers": layers,
        "num_blocks": min(int(config["num_mem_blocks"]), len(layers)),
        "adapter_rank": int(config["adapter_rank"]),
        "adapts_attention": bool(config["use_shared_attention_adapter"]),
        "head_size": size,
        "attention_scale": (size / 2) ** -0.5,
        "unrotated_layers": frozenset() if config["use_mem_rope"] else everywhere,
        "renames": block_names(layers, int(config["num_mem_blocks"])),
    }


def block_layers(config: Config) -> tuple[int, ...]:
    """The layers with a shared block: `hybrid` ones."""
    types, num_layers = config.get("layers_block_type") or config.get("layer_types"), config["num_hidden_layers"]
    if types is None and config.get("hybrid_layer_ids") is not None:
        types = ["hybrid" if i in config["hybrid_layer_ids"] else "mamba" for i in range(num_layers)]
    known = ("hybrid", *RECURRENT_TYPES)
    if not isinstance(types, list | tuple) or len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(f"layers_block_type must name {num_layers} layers, each one of {', '.join(known)}")
    if "hybrid" not in types:
        raise CheckpointError("layers_block_type without a hybrid layer is not supported")
    return tuple(i for i, kind in enumerate(types) if kind == "hybrid")


def zamba_recurrence(config: Config, layers: frozenset[int]) -> Recurrence:
    inner, heads, groups = (
        int(number)
        for number in (config["mamba_expand"] * config["hidden_size"], config["n_mamba_heads"], config["mamba_ngroups"])
    )
    if inner % heads or heads % groups:
        raise CheckpointError(f"n_mamba_heads {heads} in {groups} groups do not fit {inner} channels")
    return Recurrence(
        kind="mamba2",
        layers=layers,
        inner_size=inner,
        conv_width=int(config["mamba_d_conv"]),
        num_heads=heads,
        head_size=inner // heads,
        state_size=int(config["mamba_d_state"]),
        num_groups=groups,
        norm_groups=groups,
        time_step_limits=(float(config["time_step_min"]), math.inf),
    )


def block_names(layers: tuple[int, ...], num_blocks: int) -> tuple[tuple[str, str], ...]:
    """Files have each block in the first layer that uses it, with the adapters of all its layers in lists."""
    any_block = r"^model\.layers\.\d+\.shared_transformer\."
    names: list[tuple[str, str]] = []
    for place, layer in enumerate(layers):
        at = rf"model.layers.{layer}."
        for leaf, module in (("0", "down"), ("1", "gate_up_proj")):
            found = rf"{any_block}feed_forward\.gate_up_proj_adapter_list\.{place}\.{leaf}\."
            names.append((found, f"{at}adapters.gate_up.{module}."))
        for key in "qkv":
            for leaf, module in (("0", "down"), ("1", f"{key}_proj")):
                found = rf"{any_block}self_attn\.linear_{key}_adapter_list\.{place}\.{leaf}\."
                names.append((found, f"{at}adapters.qkv.{key}.{module}."))
    for place, layer in enumerate(layers):
        own = rf"^model\.layers\.{layer}\.shared_transformer\."
        block = f"model.blocks.{place % num_blocks}."
        names += [(rf"{own}(self_attn|feed_forward)\.", block), (own, block)]
    return (
        *names,
        (r"\.pre_ff_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.mamba_decoder\.", "."),
        (r"\.mamba\.", ".mixer."),
        (r"^model\.final_layernorm\.", "model.norm."),
    )


_ZAMBA_KEYS = """
attention_hidden_size attention_head_dim head_dim kv_channels num_query_groups mamba_headdim hybrid_layer_ids
layer_types time_step_max time_step_floor use_mamba_kernels use_mem_eff_path chunk_size num_logits_to_keep
rescale_prenorm_residual ft layers_block_type
"""

ZAMBA = {
    "Zamba2ForCausalLM": Family(
        model_type="zamba2",
        qkv_bias=False,
        output_bias=False,
        mlp_ratio=4,
        derive=zamba_2,
        understands=frozenset(_ZAMBA_KEYS.split()),
        supported={
            "add_bias_linear": (None, False),
            "rms_norm_eps": (None, 1e-5),  # norms inside of Mamba have it, whatever the others have
            "use_conv_bias": (None, True, False),  # there always is one
            "use_long_context": (None, False),
        },
        aliases={"mamba_num_heads": "n_mamba_heads"},
        defaults={
            "hidden_act": "gelu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "time_step_min": 0.001,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            **LLAMA_TOKENS,
        },
    ),
}
