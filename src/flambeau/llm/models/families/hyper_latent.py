"""Families with latent attention and hyper-connections: several streams of hidden states (Hy 4, GLM-5.3)."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import TEXT_NAMES, dense_layers, text_only
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gate_limits import limits_before_activation
from flambeau.llm.models.families.hyper_shape import HyperShape
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.kimi_delta import LINEAR_KEYS, MIXER_NAMES, delta_attention, mixer_names
from flambeau.llm.models.families.latent import (
    DEEPSEEK_ALIASES,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_NAMES,
    DERIVED_KEYS,
    deepseek_experts,
    latent_attention,
)
from flambeau.llm.models.families.layer_types import SILU, named_layers
from flambeau.llm.models.families.sparse_latent import SHARED, SPARSE_TYPES, indexer_types, read_indexer, reusing_layers

STREAM_NAMES = ((r"^(?:model\.)?hc_head\.hc_(fn|base|scale)$", r"model.streams.head.\1"),)
HY_NAMES = (
    (r"\.hc_pre\.", "."),
    (r"\.hc_head\.hc_head_", ".hc_head.hc_"),
    (r"\.hc_attn_layer\.hc_(fn|base|scale)$", r".attn_hc.\1"),
    (r"\.hc_mlp_layer\.hc_(fn|base|scale)$", r".ffn_hc.\1"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
)


def hy_4(config: Config) -> Config:
    """Coordinates of a rotation lie side by side, as in the original code; transformers rotates halves."""
    indexer = IndexerShape(
        **read_indexer(config),
        rotates_last=True,
        paired_rope=True,
        key_epsilon=float(config["rms_norm_eps"]),
        reusing_layers=reusing_layers(config),
    )
    streams = HyperShape(
        num_streams=int(config["hc_mult"]),
        epsilon=float(config["hc_eps"]),
        largest=float(config["hc_magnitude"]),
        offset=float(config["hc_eps"]),
    )
    return {
        **latent_attention({**config, "num_key_value_heads": None}),  # whatever a file says: of each head
        **deepseek_experts(config),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
        "indexer": indexer,
        "hyper": streams,
        "gate_limits": limits_before_activation(config),
    }


def linear_sizes(config: Config) -> Config:
    """Sizes of delta attention are in a section of some files, and at the top in others."""
    section = config.get("linear_attn_config") or {}
    if unknown := sorted(section.keys() - LINEAR_KEYS - {"gate_lower_bound", "safe_gate"}):
        raise CheckpointError(f"linear_attn_config has {', '.join(unknown)}, which is not supported")
    lowest = section.get("gate_lower_bound", config["linear_lower_bound"])
    if section and section.get("safe_gate", True) and lowest is None:
        lowest = -5.0
    return {
        "num_heads": int(section.get("num_heads") or config["linear_num_heads"]),
        "size": int(section.get("head_dim") or config["linear_head_dim"]),
        "conv_width": int(section.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"]),
        "lowest_log_decay": None if lowest is None else float(lowest),
    }


def glm_5_3(config: Config) -> Config:
    """Delta attention, and in every fourth layer attention to groups of tokens, without positions."""
    number, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(number)]
    types = ["full_attention" if kind in SPARSE_TYPES else kind for kind in types]
    recurrent, kinds = named_layers(types, number), indexer_types(config)
    named = (config.get("linear_attn_config") or {}).get("kda_layers")
    if named is not None and {*named} != recurrent:
        raise CheckpointError("kda_layers of linear_attn_config differ from the linear layers of layer_types")
    reusing = frozenset(i for i, kind in enumerate(kinds) if kind == SHARED) - recurrent
    if alone := sorted(i for i in reusing if i == 0 or i - 1 in recurrent):
        raise CheckpointError(f"layer {alone[0]} must have an indexer of its own: the layer before it attends to none")
    pool_size, count = int(config["index_kpool"]), int(config["index_topk"])
    if pool_size < 2 or count % pool_size:
        raise CheckpointError(f"index_kpool {pool_size} is not supported; it must be above 1 and divide {count}")
    latents = latent_attention(config)
    sizes = linear_sizes(config)
    indexer = IndexerShape(
        num_heads=int(config["index_n_heads"]),
        head_size=int(config["index_head_dim"]),
        num_chosen=count,
        pool_size=pool_size,
        reusing_layers=reusing | recurrent,
    )
    streams = HyperShape(
        num_streams=int(config["hc_mult"]),
        epsilon=float(config["hc_eps"]),
        num_rounds=int(config["hc_sinkhorn_iters"]),
        has_head=False,
    )
    return {
        **delta_attention(config, layers=recurrent, gate_rank=sizes["size"], **sizes),
        **latents,
        "latent_epsilon": float(config["rms_norm_eps"]),
        "indexer": indexer,
        "hyper": streams,
        "gate_limits": limits_before_activation(config, everywhere=True),
        "renames": (*TEXT_NAMES, *GLM_NAMES, *DEEPSEEK_NAMES, *mixer_names(recurrent), *MIXER_NAMES),
    }


GLM_NAMES = (
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.indexer\.index_kpool_compress_ape$", ".indexer.pool_bias"),
    (r"\.indexer\.index_kpool_compress_gate$", ".indexer.pool_gate"),
)
GLM_5_3 = Family(
    model_type="glm5_next_text",
    has_kv_heads=False,
    is_rotated=False,
    experts=True,
    parts={"router": "biased_sigmoid"},
    derive=glm_5_3,
    understands=DERIVED_KEYS
    | {"layer_types", "mlp_layer_types", "rope_theta", "rope_parameters", "written_head_dim", "first_k_dense_replace"}
    | {"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "linear_attn_config"}
    | {"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "linear_lower_bound"}
    | {"indexer_rope_interleave", "index_share_for_mtp_iteration"},  # nothing is rotated
    supported={
        "hidden_act": SILU,
        "rotated_size": (None, 0),
        "index_kpool_always_select_tail": (None, True),
        "index_kpool_compress": (None, True),
        "mhc": (None, True),
        "mla_use_nope": (None, True),
        "moe_router_dtype": (None, "float32"),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "rope_scaling": (None,),
    },
    aliases={"head_dim": "written_head_dim", "qk_rope_head_dim": "rotated_size", "n_routed_experts": "num_experts"},
    defaults={
        **{key: value for key, value in DEEPSEEK_DEFAULTS.items() if key != "head_dim"},
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "num_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "rotated_size": 0,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 16,
        "index_skip_topk_offset": 2,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
    },
)
HYPER_LATENT: dict[str, Family] = {
    "HYV4ForCausalLM": Family(
        model_type="hy_v4",
        has_kv_heads=False,
        experts=True,
        parts={"router": "biased_sigmoid", "has_sinks": True, "attention_gate": "sigmoid", "paired_rope": True},
        derive=hy_4,
        understands=DERIVED_KEYS
        | {"layer_types", "learnable_sink_init", "num_key_value_heads", "mtp_loss_factor", "bitwise_backward_align"}
        | {"enable_lm_head_fp32"},  # the last layer has the type of the network
        supported={
            "hidden_act": SILU,
            "enable_ihc": (None, True),
            "gated_mla": (None, True),
            "gating_type": (None, "elementwise"),
            "learnable_sink": (None, True),
            "use_dsa": (None, True),
            "use_mla": (None, True),
            "scoring_func": (None, "sigmoid"),
            "topk_method": (None, "noaux_tc"),
        },
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
    "Glm5NextForConditionalGeneration": replace(text_only(GLM_5_3), model_type="glm5_next"),
}
