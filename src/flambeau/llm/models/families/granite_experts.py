"""Granite with experts."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.models.families.config_parts import LLAMA_TOKENS, granite
from flambeau.llm.models.families.dense_others import GRANITE_SWA_DEFAULTS, granite_windows, layer_thetas
from flambeau.llm.models.families.family import Config, Family

GRANITE_MOE_NAMES = (
    (r"\.block_sparse_moe\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
)
GRANITE_MOE_KEYS = frozenset({"init_method"})
GRANITE_MOE_SUPPORTED = {
    "normalization_function": (None, "rmsnorm"),
    "position_embedding_type": (None, "rope"),
    "norm_topk_prob": (None, True),
}
GRANITE_MOE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    **LLAMA_TOKENS,
}


def granite_moe_shared(config: Config) -> Config:
    return {**granite(config), "shared_expert_size": int(config["shared_intermediate_size"])}


def granite_moe_swa(config: Config) -> Config:
    return {**granite_moe_shared(config), **layer_thetas(config), **granite_windows(config)}


GRANITE_MOE_SHARED = Family(
    model_type="granitemoeshared",
    experts=True,
    derive=granite_moe_shared,
    understands=GRANITE_MOE_KEYS,
    supported=GRANITE_MOE_SUPPORTED,
    renames=GRANITE_MOE_NAMES,
    defaults={**GRANITE_MOE_DEFAULTS, "shared_intermediate_size": 0},
)

GRANITE_EXPERTS: dict[str, Family] = {
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        experts=True,
        derive=granite,
        understands=GRANITE_MOE_KEYS,
        supported=GRANITE_MOE_SUPPORTED,
        renames=GRANITE_MOE_NAMES,
        defaults=GRANITE_MOE_DEFAULTS,
    ),
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "GraniteMoeSWAForCausalLM": replace(
        GRANITE_MOE_SHARED,
        model_type="granitemoe_swa",
        windowed="all",
        switches_window=False,
        parts={"has_sinks": True},
        derive=granite_moe_swa,
        defaults={**GRANITE_MOE_SHARED.defaults, **GRANITE_SWA_DEFAULTS},
    ),
}
