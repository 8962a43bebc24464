"""Families with latent attention to the tokens that an indexer chooses (DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import dense_layers
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.latent import DEEPSEEK_3, DERIVED_KEYS, deepseek_3

SPARSE_TYPES = {"indexed_attention", "deepseek_sparse_attention"}  # in files of transformers, and in others
FULL, SHARED = "full", "shared"
PATTERN = {"F": FULL, "S": SHARED}


def read_indexer(config: Config) -> Config:
    """The sizes of an indexer in every layer."""
    if not config.get("q_lora_rank"):
        raise CheckpointError("index_topk needs q_lora_rank: indexers read the latents of queries")
    check_types(config)
    if config["index_head_dim"] < config["head_dim"]:
        raise CheckpointError(f"index_head_dim {config['index_head_dim']} is less than the rotated part of a head")
    sizes = {"num_heads": "index_n_heads", "head_size": "index_head_dim", "num_chosen": "index_topk"}
    return {name: int(config[key]) for name, key in sizes.items()}


def check_types(config: Config) -> None:
    """Raise for layers that have no sparse attention."""
    if not set(config.get("layer_types") or ()) <= SPARSE_TYPES:
        names = " or ".join(sorted(SPARSE_TYPES))
        raise CheckpointError(f"layer_types must be {names} for all layers; others are not supported")


def deepseek_3_2(config: Config) -> Config:
    indexer = IndexerShape(**read_indexer(config), paired_rope=bool(config["indexer_rope_interleave"]))
    parts = deepseek_3(config)
    num_dense = int(config["first_k_dense_replace"])
    return {**parts, "indexer": indexer, "dense_layers": dense_layers(config, num_dense)}


def glm_5(config: Config) -> Config:
    """Some layers attend to what the indexer of an earlier one has chosen."""
    parts = deepseek_3_2(config)
    return {**parts, "indexer": replace(parts["indexer"], reusing_layers=reusing_layers(config))}


def indexer_types(config: Config) -> list[str]:
    """Which layers have an indexer: named one by one, by a letter each, or every few layers."""
    num_layers = config["num_hidden_layers"]
    pattern, every = config.get("index_topk_pattern"), max(1, int(config.get("index_topk_freq") or 1))
    types = config.get("indexer_types")
    if types is None and pattern is not None:
        types = [PATTERN.get(kind, kind) for kind in pattern]
    if types is None:
        offset = int(config["index_skip_topk_offset"])
        types = [SHARED if max(0, i - offset + 1) % every else FULL for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {FULL, SHARED}:
        raise CheckpointError(f"indexer_types must name {num_layers} layers, each one of {FULL}, {SHARED}")
    return [*types]


def reusing_layers(config: Config) -> frozenset[int]:
    """The layers that attend to what an earlier indexer has chosen."""
    types = indexer_types(config)
    if types[0] != FULL:
        raise CheckpointError("the first layer must have an indexer of its own: there is none before it")
    return frozenset(i for i, kind in enumerate(types) if kind == SHARED)


DEEPSEEK_3_2 = replace(
    DEEPSEEK_3,
    model_type="deepseek_v32",
    derive=deepseek_3_2,
    understands=DERIVED_KEYS | {"layer_types"},
    supported={key: values for key, values in DEEPSEEK_3.supported.items() if key != "index_topk"},
    defaults={
        **DEEPSEEK_3.defaults,
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": False,
    },
)


def ax_k2(config: Config) -> Config:
    return {**deepseek_3_2(config), "norm_gate_rank": int(config["gated_norm_rank"])}


AX_K2 = replace(
    DEEPSEEK_3_2,
    model_type="axk2",
    parts={"router": "zeroed_sigmoid", "joins_query_latents": True},
    derive=ax_k2,
    supported={**DEEPSEEK_3_2.supported, "rope_interleave": (None, True), "indexer_rope_interleave": (None, False)},
    renames=(
        *DEEPSEEK_3_2.renames,
        (r"\.self_attn\.q_gate_proj\.", ".self_attn.q_b_proj."),
        (r"_layernorm\.norm\.", "_layernorm."),
        (r"_layernorm\.(W_down|mlp\.fc1)\.", "_layernorm.gate_in."),
        (r"_layernorm\.(W_up|mlp\.fc2)\.", "_layernorm.gate_out."),
    ),
    defaults={
        **DEEPSEEK_3_2.defaults,
        "kv_lora_rank": 128,
        "q_lora_rank": 384,
        "head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts": 128,
        "moe_intermediate_size": 512,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "index_n_heads": 16,
        "gated_norm_rank": 16,
        "eos_token_id": 163691,
        "bos_token_id": 163691,
    },
)
SPARSE_LATENT: dict[str, Family] = {
    "AXK2ForCausalLM": AX_K2,
    "DeepseekV32ForCausalLM": DEEPSEEK_3_2,
    "GlmMoeDsaForCausalLM": replace(
        DEEPSEEK_3_2,
        model_type="glm_moe_dsa",
        derive=glm_5,
        understands=DERIVED_KEYS | {"layer_types", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"},
        defaults={
            **DEEPSEEK_3_2.defaults,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
            "indexer_rope_interleave": True,
            "index_skip_topk_offset": 2,
        },
    ),
}
