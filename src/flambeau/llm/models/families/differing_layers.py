"""Families whose layers with a window have other heads than the others: MiMo V2 and Step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import (
    DEEPSEEK_EXPERT_NAMES,
    ROTARY_KEYS,
    dense_layers,
    expert_groups,
    text_only,
)
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.gate_limits import limits_of_layers
from flambeau.llm.models.families.layer_sizes import LayerSizes

WIDE, LOCAL = "full_attention", "sliding_attention"


def layer_kinds(config: Config) -> list[str]:
    """Whether each layer has a window."""
    kinds = config.get("layer_types")
    if kinds is None or len(kinds) != config["num_hidden_layers"] or not set(kinds) <= {WIDE, LOCAL}:
        raise CheckpointError(f"layer_types must name all layers, each one of {WIDE}, {LOCAL}")
    return [*kinds]


def rotary_sizes(config: Config) -> dict[str, int | None]:
    """How much of a head is rotated in layers of each kind; None: all of it."""
    nested, size = config["rope_parameters"], config["head_dim"]
    found: dict[str, int | None] = {}
    for kind in (WIDE, LOCAL):
        rotated = int(size * float((nested.get(kind) or {}).get("partial_rotary_factor") or 1.0))
        found[kind] = None if rotated == size else rotated
    return found


def local_theta(config: Config, kinds: Sequence[str]) -> float | None:
    """That of layers with a window, if there are any."""
    return float(config["rope_parameters"][LOCAL]["rope_theta"]) if LOCAL in kinds else None


def named(flags: Sequence[Any], yes: str, no: str) -> list[str]:
    return [yes if flag else no for flag in flags]


# ---- MiMo V2 ----

MIMO_EVERY = 6  # the layers without a window, and the first one
MIMO_ROPE = {
    WIDE: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    LOCAL: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}


def with_mimo_lists(config: Config) -> Config:
    """Published files have lists of zeros and ones, and keys of layers with a window that begin with swa_."""
    found = dict(config)
    count = found["num_hidden_layers"]
    pattern, experts = found.pop("hybrid_layer_pattern", None), found.pop("moe_layer_freq", None)
    if found.get("layer_types") is None:
        pattern = pattern or [i and (i + 1) % MIMO_EVERY for i in range(count)]
        found["layer_types"] = named(pattern, LOCAL, WIDE)
    if found.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = named(experts or [i > 0 for i in range(count)], "sparse", "dense")
    if found.get("sliding_window_size") is not None:  # without the token itself
        found["sliding_window"] = found.pop("sliding_window_size") + 1
    thetas = {WIDE: found.pop("rope_theta", None), LOCAL: found.pop("swa_rope_theta", None)}
    factor = found.pop("partial_rotary_factor", None)
    if not found.get("rope_parameters"):
        found["rope_parameters"] = {
            kind: {
                **rope,
                "rope_theta": thetas[kind] or rope["rope_theta"],
                "partial_rotary_factor": factor or rope["partial_rotary_factor"],
            }
            for kind, rope in MIMO_ROPE.items()
        }
    if found.get("routed_scaling_factor") is None:
        found["routed_scaling_factor"] = 1.0
    return found


def mimo_v2(config: Config) -> Config:
    kinds, rotary = layer_kinds(config), rotary_sizes(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    own = {WIDE: kv_heads, LOCAL: int(config.get("swa_num_key_value_heads") or 2 * kv_heads)}
    same = {
        "swa_num_attention_heads": heads,
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }
    for key, expected in same.items():
        if config.get(key) not in (None, expected):
            raise CheckpointError(
                f"{key} {config[key]!r} is not supported; supported is {expected!r}, as in other layers"
            )
    if heads % own[LOCAL]:
        raise CheckpointError(f"swa_num_key_value_heads {own[LOCAL]} must divide num_attention_heads {heads}")
    scale = config.get("attention_value_scale")
    return {
        "shapes": tuple(
            LayerSizes(
                num_heads=heads,
                num_kv_heads=own[kind],
                head_size=config["head_dim"],
                intermediate_size=config["intermediate_size"],
                rotary_size=rotary[kind],
            )
            for kind in kinds
        ),
        "local_rope_theta": local_theta(config, kinds),
        "value_size": int(config["v_head_dim"]),
        "value_scale": 1.0 if scale is None else float(scale),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": dense_layers(config, 1),
    }


# ---- Step ----

STEP_ALIASES = {
    "moe_num_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
    "share_expert_dims": "share_expert_dim",
}
STEP_LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
STEP_ROPES = ("rope_theta", "partial_rotary_factors")
STEP_FIRST_SPARSE = 3


def with_step_lists(config: Config) -> Config:
    """Published files have lists that go on with the layers that predict further tokens."""
    found = dict(config)
    count = found["num_hidden_layers"]
    for key in (*STEP_LISTS, *STEP_ROPES):
        if isinstance(found.get(key), list):
            found[key] = found[key][:count]
    if found.get("layer_types") is None:
        found["layer_types"] = [WIDE] * count
    if LOCAL not in found["layer_types"]:
        found["sliding_window"] = found.get("sliding_window") or 1  # of no layer
    sparse = found.pop("moe_layers_enum", None)
    if found.get("mlp_layer_types") is None:
        items = range(STEP_FIRST_SPARSE, count) if sparse is None else sparse
        numbers = {int(item) for item in (items.split(",") if isinstance(items, str) else items) if str(item).strip()}
        found["mlp_layer_types"] = named([i in numbers for i in range(count)], "sparse", "dense")
    other = found.pop("attention_other_setting", None) or {}
    if found.get("num_sliding_attention_heads") is None:
        found["num_sliding_attention_heads"] = other.get("num_attention_heads", found["num_attention_heads"])
    check_other_heads(found, other)
    nested = found.get("rope_parameters") or {}
    if not all(isinstance(nested.get(kind), dict) for kind in set(found["layer_types"])):
        found["rope_parameters"] = step_rope(found)
        found.pop("rope_scaling", None)
    for key in (*STEP_ROPES, "yarn_only_types"):
        found.pop(key, None)
    return found


def check_other_heads(config: Config, other: Config) -> None:
    """Raise if layers with a window differ in more than their number of heads."""
    groups = config.get("num_attention_groups") or config.get("num_key_value_heads")
    sizes = {"num_attention_groups": groups, "head_dim": config.get("head_dim")}
    for key, expected in {**sizes, "true_head_dim": config.get("head_dim")}.items():
        if other.get(key) is not None and expected is not None and other[key] != expected:
            raise CheckpointError(
                f"attention_other_setting with {key} {other[key]!r} is not supported; the model has {expected!r}"
            )
    given = config.get("per_layer_config") or {}
    wanted = {"num_attention_heads": config["num_sliding_attention_heads"]}
    for number, kind in enumerate(config["layer_types"]):
        one = dict(given.get(str(number)) or given.get(number) or {})
        if one and (kind != LOCAL or one != wanted):
            raise CheckpointError(f"per_layer_config of layer {number} is not supported: {one!r}")


def step_rope(config: Config) -> dict[str, Any]:
    """The rope parameters of each kind of layers, from lists of all layers; only those without a window are scaled."""
    scaled = config.get("yarn_only_types")
    if scaled is not None and [*scaled] != [WIDE]:
        raise CheckpointError(f"yarn_only_types {scaled!r} is not supported; supported is ['{WIDE}']")
    found: dict[str, Any] = {}
    for kind in (WIDE, LOCAL):
        layers = [number for number, one in enumerate(config["layer_types"]) if one == kind]
        if not layers:
            continue
        found[kind] = {"rope_type": "default", "rope_theta": common(config, "rope_theta", layers, 10000.0)}
        if config.get("partial_rotary_factors"):
            found[kind]["partial_rotary_factor"] = common(config, "partial_rotary_factors", layers, 1.0)
        if kind == WIDE:
            found[kind] |= config.get("rope_scaling") or {}
    return found


def common(config: Config, key: str, layers: Sequence[int], default: float) -> float:
    """The number of some layers, which must be the same."""
    given = config.get(key)
    given = default if given is None else given
    numbers = {given[layer] for layer in layers} if isinstance(given, list) else {given}
    if len(numbers) > 1:
        raise CheckpointError(f"{key} that differs among layers of one type is not supported")
    return float(numbers.pop())


def step(config: Config) -> Config:
    kinds, rotary = layer_kinds(config), rotary_sizes(config)
    heads = {WIDE: config["num_attention_heads"], LOCAL: int(config["num_sliding_attention_heads"])}
    if heads[LOCAL] % config["num_key_value_heads"]:
        raise CheckpointError("num_sliding_attention_heads must be a multiple of num_key_value_heads")
    scalar = config.get("query_pre_attn_scalar")
    return {
        "shapes": tuple(
            LayerSizes(
                num_heads=heads[kind],
                num_kv_heads=config["num_key_value_heads"],
                head_size=config["head_dim"],
                intermediate_size=config["intermediate_size"],
                rotary_size=rotary[kind],
            )
            for kind in kinds
        ),
        "local_rope_theta": local_theta(config, kinds),
        "attention_scale": None if scalar is None else float(scalar) ** -0.5,
        "shared_expert_size": int(config["share_expert_dim"]),
        "routed_scale": float(config["moe_router_scaling_factor"]),
        "dense_layers": dense_layers(config, STEP_FIRST_SPARSE),
        "gate_limits": limits_of_layers(config, "swiglu_limits", "swiglu_limits_shared"),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


STEP_EXPERT_NAMES = (
    (r"\.moe\.router_bias$", ".mlp.score_bias"),
    (r"\.moe\.gate\.", ".mlp.gate."),
    (r"\.moe\.(gate_proj|up_proj|down_proj)\.weight", r".mlp.experts.\1"),
    (r"\.moe\.experts\.", ".mlp.experts."),
    (r"\.(share_expert|mlp\.shared_experts)\.", ".mlp.shared_expert."),
    (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
)
STEP = Family(
    model_type="step3p5",
    qk_norm=True,
    windowed="named",
    switches_window=False,
    has_local_rope=True,
    experts=True,
    arrange=with_step_lists,
    parts={"norm_offset": 1.0, "router": "biased_sigmoid", "attention_gate": "sigmoid_per_head"},
    derive=step,
    understands=ROTARY_KEYS
    | {"num_local_experts", "mtp_layer_types", "mtp_mlp_layer_types", "per_layer_config", "max_seq_len"}
    | {"moe_layer_offset", "need_fp32_gate"},
    supported={
        "gating": (None, "per-head", True),
        "use_head_wise_attn_gate": (None, True),
        "use_qk_norm": (None, True),
        "zero_centered": (None, True),
        "use_moe_router_bias": (None, True),
        "moe_router_activation": (None, "sigmoid"),
        "norm_expert_weight": (None, True),
        "att_impl_type": (None, "GQA"),
        "use_moe": (None, True),
        "use_rope_layers": (None, []),
        "moe_every_n_layer": (None, 1),
        "hidden_act": (None, "silu"),
    },
    aliases=STEP_ALIASES,
    renames=(*DEEPSEEK_EXPERT_NAMES, *STEP_EXPERT_NAMES),
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128815,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "num_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
    },
)
DIFFERING_LAYERS = {
    "MiMoV2FlashForCausalLM": Family(
        model_type="mimo_v2_flash",
        output_bias=False,
        windowed="named",
        switches_window=False,
        has_local_rope=True,
        experts=True,
        arrange=with_mimo_lists,
        parts={
            "has_sinks": True,
            "sinks_in_windows": True,
            "router": "biased_sigmoid",
            "unused": r"^model\.mtp\.",
        },
        derive=mimo_v2,
        understands=ROTARY_KEYS
        | {"num_local_experts", "hybrid_block_size", "attention_chunk_size"},  # which nothing reads
        supported={
            "add_swa_attention_sink_bias": (None, True),
            "add_full_attention_sink_bias": (None, False),
            "n_shared_experts": (None, 0),
            "topk_method": (None, "noaux_tc"),
            "scoring_func": (None, "sigmoid"),
        },
        aliases={"n_routed_experts": "num_experts", "layernorm_epsilon": "rms_norm_eps"},
        renames=((r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"), *DEEPSEEK_EXPERT_NAMES),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "attention_value_scale": 0.707,
            "bos_token_id": 1,
        },
    ),
    "Step3p5ForCausalLM": STEP,
    "Step3p7ForConditionalGeneration": replace(text_only(STEP), model_type="step3p7"),
}
