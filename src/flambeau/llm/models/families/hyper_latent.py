"""Families with latent attention and hyper-connections: several streams of hidden states (Hy 4)."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import dense_layers
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.hyper_shape import HyperShape
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.latent import (
    DEEPSEEK_ALIASES,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_NAMES,
    DERIVED_KEYS,
    deepseek_experts,
    latent_attention,
)
from flambeau.llm.models.families.layer_types import SILU
from flambeau.llm.models.families.sparse_latent import SHARED, indexer_types, read_indexer

STREAM_NAMES = ((r"^(?:model\.)?hc_head\.hc_(fn|base|scale)$", r"model.streams.head.\1"),)
HY_NAMES = (
    (r"\.hc_pre\.", "."),
    (r"\.hc_head\.hc_head_", ".hc_head.hc_"),
    (r"\.hc_attn_layer\.hc_(fn|base|scale)$", r".attn_hc.\1"),
    (r"\.hc_mlp_layer\.hc_(fn|base|scale)$", r".ffn_hc.\1"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
)


def gate_limit(config: Config) -> float:
    """The limit of gates, which has to be positive."""
    limit = config["swiglu_limit"]
    if not isinstance(limit, int | float) or limit <= 0:
        raise CheckpointError(f"swiglu_limit {limit!r} is not supported; it must be a number above 0")
    return float(limit)


def hy_4(config: Config) -> Config:
    kinds = indexer_types(config)
    indexer = IndexerShape(
        **read_indexer(config),
        rotates_last=True,
        key_epsilon=float(config["rms_norm_eps"]),
        reusing_layers=frozenset(i for i, kind in enumerate(kinds) if kind == SHARED),
    )
    streams = HyperShape(
        num_streams=int(config["hc_mult"]),
        epsilon=float(config["hc_eps"]),
        largest=float(config["hc_magnitude"]),
        offset=float(config["hc_eps"]),
    )
    return {
        **latent_attention(config),
        **deepseek_experts(config),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
        "indexer": indexer,
        "hyper": streams,
        "gate_limit": gate_limit(config),
    }


HYPER_LATENT: dict[str, Family] = {
    "HYV4ForCausalLM": Family(
        model_type="hy_v4",
        has_kv_heads=False,
        experts=True,
        parts={"router": "biased_sigmoid", "has_sinks": True, "attention_gate": "sigmoid"},
        derive=hy_4,
        understands=DERIVED_KEYS | {"layer_types", "learnable_sink_init"},
        supported={"hidden_act": SILU},
        aliases=DEEPSEEK_ALIASES,
        renames=(*DEEPSEEK_NAMES, *HY_NAMES, *STREAM_NAMES),
        defaults={
            **DEEPSEEK_DEFAULTS,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 768,
            "routed_scaling_factor": 2.827,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "index_n_heads": 16,
            "index_head_dim": 128,
            "index_topk": 2048,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 2,
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "eos_token_id": 120025,
            "bos_token_id": 120000,
        },
    ),
}
