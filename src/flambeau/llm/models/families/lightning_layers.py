"""Families with lightning attention, whose states decay by a constant of each head: MiniMax 01 and M1, Ling 2.5."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.kimi_delta import EXPERT_ALIASES, LINEAR_SIZE, LING_NAMES, MIXER_NAMES, mixer_names
from flambeau.llm.models.families.latent import ALIASES, DEEPSEEK_DEFAULTS, DEEPSEEK_NAMES, DERIVED_KEYS, deepseek_3
from flambeau.llm.models.families.layer_types import SILU, named_layers
from flambeau.llm.models.families.recurrence import Recurrence

NORM_EPSILON = 1e-6  # of the norm of outputs, whatever config.json says of the others


def minimax(config: Config) -> Config:
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    types = config.get("layer_types")
    if types is None and config.get("attn_type_list") is not None:
        types = ["full_attention" if is_full else "linear_attention" for is_full in config["attn_type_list"]]
    if types is None:
        types = ["linear_attention" if i % 2 else "full_attention" for i in range(num_layers)]
    layers = named_layers(types, num_layers)
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    recurrence = replace(
        lightning_attention(config, layers, heads, size),
        inner_epsilon=NORM_EPSILON,
        activates_inputs=True,
    )
    scales = tuple(
        (float(config[f"{part}_alpha_factor"]), float(config[f"{part}_beta_factor"]))
        for part in ("full_attn", "linear_attn", "mlp")
    )
    rotated = int(config.get("rotary_dim") or size)
    return {
        "recurrence": recurrence,
        "stream_scales": scales,
        "renames": (*mixer_names(layers), *LIGHTNING_NAMES),
        **({} if rotated == size else {"rotary_size": rotated}),
    }


def lightning_attention(
    config: Config, layers: frozenset[int], heads: int, size: int, *, first_layer: int = 0
) -> Recurrence:
    """Lightning attention in these layers; states of later ones decay more slowly."""
    num_layers = config["num_hidden_layers"]
    if num_layers < 2:
        raise CheckpointError("num_hidden_layers must be 2 or more: decays fall from the first layer to the last")
    return Recurrence(
        kind="lightning",
        layers=layers,
        inner_size=heads * size,
        conv_width=1,
        conv_bias=False,
        num_heads=heads,
        head_size=size,
        state_size=size,
        num_groups=heads,
        slope_factors=tuple(1 - (layer + first_layer) / (num_layers - 1) + 1e-5 for layer in range(num_layers)),
    )


def ling_2_5(config: Config) -> Config:
    """Every so many layers one has latent attention, and those have it that are left at the end."""
    num_layers, every = config["num_hidden_layers"], int(config["layer_group_size"])
    heads, size, groups = config["num_attention_heads"], int(config["linear_head_size"]), int(config["group_norm_size"])
    layers = frozenset(i for i in range(num_layers // every * every) if (i + 1) % every)
    rotated = int(size * float(config["partial_rotary_factor"]))
    if rotated != config["head_dim"]:
        raise CheckpointError(
            f"{rotated} rotated dimensions of head_dim {size} and qk_rope_head_dim {config['head_dim']} differ, which "
            "is not supported: both have the same rotary positions"
        )
    if heads * size % groups:
        raise CheckpointError(f"group_norm_size {groups} must divide {heads * size} channels")
    recurrence = replace(
        lightning_attention(config, layers, heads, size, first_layer=-1),  # as in the publisher's code
        is_grouped=False,
        norm_groups=groups,
        normalizes_qk=bool(config["use_qk_norm"]),
        rotary_size=rotated,
        query_scale=size**-0.5,
    )
    names = (*LING_NAMES, *DEEPSEEK_NAMES, *mixer_names(layers), *MIXER_NAMES, *LIGHTNING_NAMES)
    return {**deepseek_3(config), "recurrence": recurrence, "renames": names}


LIGHTNING_NAMES = (
    (r"\.mixer\.query_key_value\.", ".mixer.in_proj_qkv."),
    (r"\.mixer\.dense\.", ".mixer.out_proj."),
    (r"\.mixer\.query_layernorm\.", ".mixer.q_norm."),
    (r"\.mixer\.key_layernorm\.", ".mixer.k_norm."),
    (r"\.mixer\.g_proj\.", ".mixer.in_proj_z."),
    (r"\.mixer\.g_norm\.", ".mixer.norm."),
    (r"\.mixer\.qkv_proj\.", ".mixer.in_proj_qkv."),
    (r"\.mixer\.output_gate\.", ".mixer.in_proj_z."),
)
MINIMAX = Family(
    model_type="minimax",
    qkv_bias=False,
    output_bias=False,
    experts=True,
    parts={"norm_places": "stream"},
    derive=minimax,
    understands=frozenset({"layer_types", "attn_type_list", "block_size", "rotary_dim", "shared_moe_mode"}),
    supported={
        "hidden_act": SILU,
        "postnorm": (None, True),
        "shared_intermediate_size": (None, 0),
        "sliding_window": (None,),
        "router_jitter_noise": (None, 0.0, 0),
        "norm_topk_prob": (None, True),
    },
    aliases={
        f"layernorm_{given}_{factor}": f"{own}_{factor}_factor"
        for given, own in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
        for factor in ("alpha", "beta")
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "full_attn_alpha_factor": 1.0,
        "full_attn_beta_factor": 1.0,
        "linear_attn_alpha_factor": 1.0,
        "linear_attn_beta_factor": 1.0,
        "mlp_alpha_factor": 1.0,
        "mlp_beta_factor": 1.0,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
)
LIGHTNING = {
    "MiniMaxForCausalLM": MINIMAX,
    "MiniMaxText01ForCausalLM": MINIMAX,
    "MiniMaxM1ForCausalLM": MINIMAX,
    "BailingMoeV2_5ForCausalLM": Family(
        model_type="bailing_moe_v2_5",
        has_kv_heads=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=ling_2_5,
        understands=DERIVED_KEYS
        | {
            "use_qk_norm",
            "partial_rotary_factor",
            "max_window_layers",
            "mtp_loss_scaling_factor",
            "router_dtype",
            "linear_backend",
        },
        supported={
            "hidden_act": SILU,
            "topk_method": (None, "noaux_tc"),
            "scoring_func": (None, "sigmoid"),
            "score_function": (None, "sigmoid"),
            "rope_interleave": (None, True),
            "moe_router_enable_expert_bias": (None, True),
            "norm_topk_prob": (None, True),
            "use_bias": (None, False),
            "use_qkv_bias": (None, False),
            "linear_silu": (None, False),
            "use_linear_silu": (None, False),
            "linear_rope": (None, True),
            "rotary_dim": (None,),
            "using_split_qkv_in_self_attention": (None, False),
        },
        aliases={**ALIASES, **EXPERT_ALIASES, **LINEAR_SIZE},
        defaults={
            **DEEPSEEK_DEFAULTS,
            "q_lora_rank": None,
            "max_position_embeddings": 32768,
            "rope_theta": 6e5,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "moe_intermediate_size": 512,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "rope_interleave": True,
            "linear_head_size": 128,
            "partial_rotary_factor": 0.5,
            "layer_group_size": 5,
            "group_norm_size": 4,
            "use_qk_norm": True,
            "eos_token_id": 156892,
        },
    ),
}
