"""Families with attention to compressed entries (DeepSeek V4)."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.compression_shape import CompressionShape
from flambeau.llm.models.families.config_parts import DEEPSEEK_EXPERT_NAMES
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gate_limits import limits_before_activation
from flambeau.llm.models.families.hyper_latent import STREAM_NAMES
from flambeau.llm.models.families.hyper_shape import HyperShape
from flambeau.llm.models.families.layer_types import SILU
from flambeau.llm.models.families.recurrence import Recurrence

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, ROUTED = "hash_moe", "moe"
PUBLISHED_RATES = {0: SLIDING, 4: SPARSE, 128: HEAVY}
RATES = {SPARSE: 4, HEAVY: 128}
RATE_KEYS = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
_OWN_KEYS = """
compress_rates compress_ratios compress_rate_csa compress_rate_hca layer_types mlp_layer_types num_hash_layers
partial_rotary_factor qk_rope_head_dim compress_rope_theta expert_dtype rope_theta sliding_window num_local_experts
"""
OWN_KEYS = frozenset(_OWN_KEYS.split())


def attention_types(config: Config) -> list[str]:
    """Which kind of attention each layer has: named, by the tokens of an entry, or in turn."""
    number, types, ratios = config["num_hidden_layers"], config.get("layer_types"), config.get("compress_ratios")
    if types is None and ratios is not None:
        ratios = ratios[:number]  # those of layers for further tokens follow
        if unknown := sorted({*ratios} - {*PUBLISHED_RATES}):
            raise CheckpointError(f"compress_ratios of {unknown[0]} are not supported; supported are 0, 4 and 128")
        types = [PUBLISHED_RATES[ratio] for ratio in ratios]
    if types is None:
        types = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(number)]
    if len(types) < number or not {*types} <= {SLIDING, SPARSE, HEAVY}:
        raise CheckpointError(f"layer_types must name {number} layers, each one of {SLIDING}, {SPARSE}, {HEAVY}")
    return [*types[:number]]


def rates_of(config: Config, types: list[str]) -> tuple[int, ...]:
    """The tokens of an entry in each layer."""
    rates = {**RATES, **(config.get("compress_rates") or {})}
    rates |= {kind: config[key] for kind, key in RATE_KEYS.items() if config.get(key) is not None}
    if not all(isinstance(rate, int) and rate > 1 for rate in rates.values()):
        raise CheckpointError(f"compress_rates {rates!r} are not supported; they must be whole numbers above 1")
    return tuple(0 if kind == SLIDING else int(rates[kind]) for kind in types)


def hashed_layers(config: Config) -> frozenset[int]:
    """The layers whose experts depend on the token alone."""
    number, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(min(number, int(config["num_hash_layers"]))))
    if len(kinds) < number or not {*kinds} <= {HASHED, ROUTED}:
        raise CheckpointError(f"mlp_layer_types must name {number} layers, each one of {HASHED}, {ROUTED}")
    return frozenset(i for i, kind in enumerate(kinds[:number]) if kind == HASHED)


def thetas(config: Config) -> tuple[float, float]:
    """Of layers with entries, and of those without."""
    given = config.get("rope_parameters") or {}
    if "main" in given and "compress" in given:
        return float(given["compress"]["rope_theta"]), float(given["main"]["rope_theta"])
    return float(config["compress_rope_theta"]), float(config["rope_theta"])


def rotary_size(config: Config) -> int:
    size, named, factor = config["head_dim"], config.get("qk_rope_head_dim"), config.get("partial_rotary_factor")
    if factor is None:
        factor = 0.125 if named is None else named / size
    given = config.get("rope_parameters") or {}
    for section in (given, *(given.get(key) or {} for key in ("main", "compress"))):
        if section.get("partial_rotary_factor", factor) != factor:
            raise CheckpointError("partial_rotary_factor must be the same for all layers; others are not supported")
    return int(size * factor)


def deepseek_4(config: Config) -> Config:
    types = attention_types(config)
    heads, groups, size = config["num_attention_heads"], int(config["o_groups"]), int(config["head_dim"])
    if heads % groups:
        raise CheckpointError(f"o_groups {groups!r} is not supported; it must divide {heads}, the number of heads")
    compression = CompressionShape(
        rates=rates_of(config, types),
        overlapping_layers=frozenset(i for i, kind in enumerate(types) if kind == SPARSE),
        num_index_heads=int(config["index_n_heads"]),
        index_size=int(config["index_head_dim"]),
        num_chosen=int(config["index_topk"]),
        num_output_groups=groups,
        output_rank=int(config["o_lora_rank"]),
    )
    rotated = rotary_size(config)
    if compression.overlapping_layers and compression.index_size < rotated:
        raise CheckpointError(f"index_head_dim {compression.index_size} is less than the rotated part of a head")
    if compression.overlapping_layers and compression.num_chosen < 1:
        raise CheckpointError(f"index_topk {compression.num_chosen} is not supported; it must be a number from 1")
    compressing, (wide, local) = compression.compressing_layers, thetas(config)
    recurrence = Recurrence(
        kind="compressor",
        layers=compressing,
        inner_size=size,
        state_size=compression.index_size,
        is_beside_attention=True,
    )
    streams = HyperShape(
        num_streams=int(config["hc_mult"]),
        epsilon=float(config["hc_eps"]),
        num_rounds=int(config["hc_sinkhorn_iters"]),
    )
    return {
        "compression": compression,
        "recurrence": recurrence if compressing else None,
        "hyper": streams,
        "hashed_layers": hashed_layers(config),
        "query_latent_size": int(config["q_lora_rank"]),
        "rotary_size": rotated,
        "rope_theta": wide,
        "local_rope_theta": local,
        "windows": (int(config["sliding_window"]),) * len(types),
        "gate_limits": limits_before_activation(config, everywhere=True),
        "shared_expert_size": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


NAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.(compressor\.indexer|indexer\.compressor)\.", ".self_attn.index_compressor."),
    (r"\.index_compressor\.(?:q_b_proj|wq_b)\.", ".indexer.wq_b."),
    (r"\.index_compressor\.(?:scorer\.)?weights_proj\.", ".indexer.weights_proj."),
    (r"\.self_attn\.wq_(a|b)\.", r".self_attn.q_\1_proj."),
    (r"\.self_attn\.wo_(a|b)\.", r".self_attn.o_\1_proj."),
    (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"compressor\.(?:wgate|gate_proj)\.", "compressor.score_proj."),
    (r"\.self_attn\.((?:index_)?compressor\.)?norm\.", r".self_attn.\1kv_norm."),
    (r"compressor\.ape$", "compressor.position_bias"),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.gate\.tid2eid$", ".mlp.token_experts"),
)

COMPRESSED: dict[str, Family] = {
    "DeepseekV4ForCausalLM": Family(
        model_type="deepseek_v4",
        experts=True,
        parts={"router": "biased_sqrt_softplus"},
        derive=deepseek_4,
        understands=OWN_KEYS,
        has_local_rope=True,
        rope_sections=("compress", "main"),
        attention_factor=1.0,
        supported={
            "hidden_act": SILU,
            "num_key_value_heads": (None, 1),
            "scoring_func": (None, "sqrtsoftplus"),
            "norm_topk_prob": (None, True),
            "topk_method": (None, "noaux_tc"),
            "attention_bias": (None, False),
            "mlp_bias": (None, False),
        },
        aliases={"n_routed_experts": "num_experts"},
        renames=(*NAMES, *DEEPSEEK_EXPERT_NAMES, *STREAM_NAMES),
        defaults={
            "intermediate_size": 2048,  # of layers without experts, which there are none of
            "head_dim": 512,
            "num_key_value_heads": 1,
            "q_lora_rank": 1024,
            "max_position_embeddings": 1048576,
            "rope_theta": 10000.0,
            "compress_rope_theta": 160000.0,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.5,
            "num_hash_layers": 3,
            "num_nextn_predict_layers": 1,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "eos_token_id": 1,
            "bos_token_id": 0,
        },
    ),
}
