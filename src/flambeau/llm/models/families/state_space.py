"""Families of state-space layers alone (Mamba 1 and 2), and what hybrids read of these from config.json."""

from __future__ import annotations

import math
from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_types import SILU
from flambeau.llm.models.families.recurrence import Recurrence


def mamba_2_layers(config: Config, layers: frozenset[int]) -> Recurrence:
    """Mamba 2 by the keys that hybrid models have for it.

    Each group has a norm of its own, as in the original code; transformers up to 5.22 has one norm for all of them.
    """
    inner = int(config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"])
    heads, groups = int(config["mamba_n_heads"]), int(config["mamba_n_groups"])
    named = config["mamba_d_head"]
    size = inner // heads if named == "auto" else int(named)
    if heads * size != inner or heads % groups:
        raise CheckpointError(
            f"{heads} heads of size {size} in {groups} groups do not fit {inner} channels, which is mamba_expand times "
            "hidden_size, or mamba_d_ssm"
        )
    return Recurrence(
        kind="mamba2",
        layers=layers,
        inner_size=inner,
        conv_width=int(config["mamba_d_conv"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config["mamba_proj_bias"]),
        num_heads=heads,
        head_size=size,
        state_size=int(config["mamba_d_state"]),
        num_groups=groups,
        norm_groups=groups,
        time_step_limits=time_step_limits(config),
    )


def time_step_limits(config: Config) -> tuple[float, float]:
    """`time_step_limit`; JSON has no infinity, and transformers writes it as an object."""
    given = config["time_step_limit"] or (0.0, math.inf)
    low, high = (float(end["__float__"] if isinstance(end, dict) else end) for end in given)
    return low, high


def mamba_2(config: Config) -> Config:
    recurrence = mamba_2_layers(config, frozenset(range(config["num_hidden_layers"])))
    return {"recurrence": recurrence, "wide_residual": bool(config["residual_in_fp32"])}


def mamba_1_layers(config: Config, layers: frozenset[int]) -> Recurrence:
    """Mamba 1 by the keys that hybrid models have for it, and without norms inside."""
    hidden, rank = config["hidden_size"], config["mamba_dt_rank"]
    return Recurrence(
        kind="mamba",
        layers=layers,
        inner_size=int(config["mamba_expand"] * hidden),
        conv_width=int(config["mamba_d_conv"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config["mamba_proj_bias"]),
        state_size=int(config["mamba_d_state"]),
        time_step_rank=math.ceil(hidden / 16) if rank == "auto" else int(rank),
    )


def mamba_1(config: Config) -> Config:
    layers = frozenset(range(config["num_hidden_layers"]))
    return {"recurrence": mamba_1_layers(config, layers), "wide_residual": bool(config["residual_in_fp32"])}


def falcon_mamba(config: Config) -> Config:
    parts = mamba_1(config)
    norms = {"inner_norms": "plain", "inner_epsilon": float(config["mixer_rms_eps"])}
    return {**parts, "recurrence": replace(parts["recurrence"], **norms)}


MAMBA_2_DEFAULTS = {
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}
# How a prompt is cut into chunks, and how weights were initialized, has no effect on what is computed.
MAMBA_KEYS = frozenset({"mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"})
KERNEL_KEYS = frozenset(
    {"mamba_dt_rank", "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"}
)

MAMBA_1 = Family(
    model_type="mamba",
    parts={"has_mlp": False},
    derive=mamba_1,
    understands=MAMBA_KEYS
    | KERNEL_KEYS
    | {"chunk_size", "rescale_prenorm_residual", "time_step_init_scheme", "time_step_scale", "rms_norm"}
    | {"d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "norm_before_gate"},
    supported={"hidden_act": SILU},
    epsilon_key="layer_norm_epsilon",
    aliases={
        "expand": "mamba_expand",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "time_step_rank": "mamba_dt_rank",
    },
    renames=(
        (r"^backbone\.embeddings?\.", "model.embed_tokens."),
        (r"^backbone\.norm_f\.", "model.norm."),
        (r"^backbone\.layers\.(\d+)\.norm\.", r"model.layers.\1.input_layernorm."),
        (r"^backbone\.", "model."),
    ),
    defaults={
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_dt_rank": "auto",
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        "num_attention_heads": 1,  # there is no attention, and no feed-forward layer
        "head_dim": 2,
        "intermediate_size": 1,
        "max_position_embeddings": 131072,  # there is no limit
        "eos_token_id": 0,
        "bos_token_id": 0,
    },
)
STATE_SPACE = {
    "MambaForCausalLM": MAMBA_1,
    "FalconMambaForCausalLM": replace(
        MAMBA_1,
        model_type="falcon_mamba",
        derive=falcon_mamba,
        understands=MAMBA_1.understands | {"use_falcon_mambapy"},
        defaults={**MAMBA_1.defaults, "mixer_rms_eps": 1e-6},
    ),
    "Mamba2ForCausalLM": replace(
        MAMBA_1,
        model_type="mamba2",
        derive=mamba_2,
        aliases={
            **MAMBA_1.aliases,
            "num_heads": "mamba_n_heads",
            "head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
        },
        defaults={
            **MAMBA_1.defaults,
            **MAMBA_2_DEFAULTS,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
    ),
}
