"""Dots 3 Note: latent attention to the tokens that an indexer chooses, or to a window with latents of other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import dense_layers, expert_groups, text_only
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.latent import DEEPSEEK_ALIASES, DEEPSEEK_NAMES, DERIVED_KEYS
from flambeau.llm.models.families.layer_sizes import LatentSizes, LayerSizes

INDEXED, WIDE, LOCAL = "indexed_attention", "full_attention", "sliding_attention"
LOCAL_SIZES = {  # of layers with a window, in published files with the prefix swa_
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
    "qk_rope_head_dim": None,  # the rest of a head
}
LOCAL_THETA = 50_000.0


def with_sections(config: Config) -> Config:
    """Published files have flags instead of types of layers, and keys that begin with swa_."""
    found = dict(config)
    count, is_written = int(found["num_hidden_layers"]), "per_layer_config" in found
    is_indexed = found.pop("use_dsa", None if is_written else True)
    has_windows = found.pop("use_sliding_window", True)
    types = found.get("layer_types")
    if types is None:
        wide = WIDE if is_indexed is False else INDEXED
        types = [LOCAL if has_windows and i >= 2 and i % 4 != 1 else wide for i in range(count)]
    if is_indexed is not None:
        types = [(INDEXED if is_indexed else WIDE) if kind in (INDEXED, WIDE) else kind for kind in types]
    if len(types) != count or not set(types) <= {INDEXED, WIDE, LOCAL}:
        raise CheckpointError(f"layer_types must name {count} layers, each one of {INDEXED}, {WIDE}, {LOCAL}")
    own = {key: found.pop(f"swa_{key}", size) for key, size in LOCAL_SIZES.items()}
    if own["qk_rope_head_dim"] is None:
        own["qk_rope_head_dim"] = own["head_dim"] - own["qk_nope_head_dim"]
    sizes = {str(i): own for i, kind in enumerate(types) if kind == LOCAL}
    window = found.pop("sliding_window_size", 512)
    return {
        **found,
        "layer_types": [*types],
        "per_layer_config": found["per_layer_config"] if is_written else sizes,
        "sliding_window": window if found.get("sliding_window") is None else found["sliding_window"],
        "mlp_layer_types": mlp_types(found, count),
        "rope_parameters": rope_sections(found, {*types}),
        "shared_experts_intermediate_size": found.pop(
            "moe_shared_expert_intermediate_size", found.get("shared_experts_intermediate_size", 1536)
        ),
        **dict.fromkeys(("rope_scaling", "swa_rope_theta", "moe_layer_freq", "first_k_dense_replace", "rope_theta")),
    }


def mlp_types(config: Config, count: int) -> list[str]:
    """Which layers have experts."""
    if config.get("mlp_layer_types") is not None:
        return [*config["mlp_layer_types"]]
    first, given = config.get("first_k_dense_replace", 1), config.get("moe_layer_freq", 1)
    flags = given if isinstance(given, list) else [i % given == 0 for i in range(count)]
    return ["sparse" if i >= first and flags[i] else "dense" for i in range(count)]


def rope_sections(config: Config, types: set[str]) -> dict[str, Any]:
    """The rope parameters of layers with a window, and those of all others; the sizes of heads say what is rotated."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    thetas = {LOCAL: config.get("swa_rope_theta", LOCAL_THETA)}
    default = config.get("rope_theta", 8e7)
    sections = {}
    for kind in types:
        own = given.get(kind, {}) if any(isinstance(value, Mapping) for value in given.values()) else given
        theta = default if given else thetas.get(kind, default)
        kept = {key: value for key, value in own.items() if key != "partial_rotary_factor"}
        sections[kind] = {"rope_type": "default", "rope_theta": theta, **kept}
    wide = [section for kind, section in sections.items() if kind != LOCAL]
    if any(section != wide[0] for section in wide):
        raise CheckpointError(f"rope_parameters that differ between {INDEXED} and {WIDE} are not supported")
    return {WIDE: wide[0] if wide else {}, **({LOCAL: sections[LOCAL]} if LOCAL in sections else {})}


def own_sizes(config: Config, layer: int) -> dict[str, int]:
    """The sizes of one layer, by the keys of layers with a window, whether they are its own or those of all."""
    given = config["per_layer_config"]
    own = dict(given.get(str(layer)) or given.get(layer) or {})
    if unknown := sorted(own.keys() - LOCAL_SIZES.keys()):
        raise CheckpointError(f"per_layer_config of layer {layer} has {', '.join(unknown)}, which is not supported")
    common = {**config, "qk_rope_head_dim": config["head_dim"]}  # the key's name after aliases
    sizes = {key: int(own.get(key, common.get(key)) or 0) for key in LOCAL_SIZES}
    if not sizes["q_lora_rank"]:
        raise CheckpointError("q_lora_rank is needed here: queries come from latents")
    if sizes["num_key_value_heads"] != sizes["num_attention_heads"]:
        raise CheckpointError(f"num_key_value_heads of layer {layer} must be the number of its heads")
    return sizes


def layer_sizes(config: Config, layer: int) -> tuple[LayerSizes, LatentSizes]:
    sizes, hidden = own_sizes(config, layer), config["hidden_size"]
    latent, query, rotated = (sizes[key] for key in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"))
    latents = LatentSizes(
        latent_size=latent,
        query_latent_size=query,
        unrotated_size=sizes["qk_nope_head_dim"],
        value_size=sizes["v_head_dim"],
        latent_scale=(hidden / latent) ** 0.5,
        # With the scale of latents of queries; that of those which an indexer reads does not change its choice.
        attention_scale=(hidden / query) ** 0.5 * (sizes["qk_nope_head_dim"] + rotated) ** -0.5,
    )
    shape = LayerSizes(
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=1,
        head_size=latent + rotated,
        intermediate_size=config["intermediate_size"],
        rotary_size=rotated,
        latents=latents,
    )
    return shape, latents


def dots_note(config: Config) -> Config:
    types, window = config["layer_types"], config["sliding_window"]
    shapes, latents = zip(*(layer_sizes(config, layer) for layer in range(len(types))), strict=True)
    local = {shape.rotary_size for shape, kind in zip(shapes, types, strict=True) if kind == LOCAL}
    wide = {shape.rotary_size for shape, kind in zip(shapes, types, strict=True) if kind != LOCAL}
    if len(local) > 1 or len(wide) > 1:
        raise CheckpointError("per_layer_config with another qk_rope_head_dim in layers of one type is not supported")
    first = next((i for i, kind in enumerate(types) if kind != LOCAL), 0)
    parts: dict[str, Any] = {
        **latents[first]._asdict(),
        "num_kv_heads": 1,
        "head_size": shapes[first].head_size,
        "rotary_size": shapes[first].rotary_size,
        "shapes": shapes,
        "latent_epsilon": float(config["rms_norm_eps"]),
        "shared_expert_size": int(config["n_shared_experts"]) * int(config["shared_experts_intermediate_size"]),
        **expert_groups(config),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": dense_layers(config, 1),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
        "indexer": indexer(config, types),
    }
    if local:
        parts["windows"] = tuple(int(window) if kind == LOCAL else None for kind in types)
        parts["local_rope_theta"] = float(config["rope_parameters"][LOCAL]["rope_theta"])
    return parts


def indexer(config: Config, types: list[str]) -> IndexerShape | None:
    """That of some layers; None: no layer has one."""
    shape = IndexerShape(
        num_heads=int(config["index_n_heads"]),
        head_size=int(config["index_head_dim"]),
        num_chosen=int(config["index_topk"]),
        paired_rope=True,
        plain_layers=frozenset(i for i, kind in enumerate(types) if kind != INDEXED),
    )
    if INDEXED not in types:
        return None
    if shape.head_size < config["head_dim"]:
        raise CheckpointError(f"index_head_dim {shape.head_size} is less than the rotated part of a head")
    return shape


DOTS_NOTE = Family(
    model_type="dots3_note_text",
    has_kv_heads=False,
    experts=True,
    has_local_rope=True,
    arrange=with_sections,
    parts={
        "router": "biased_sigmoid",
        "paired_rope": True,
        "gates_heads": True,
        "normalizes_rotated_keys": True,
        "unused": r"^model\.(language_model\.)?mtp\.",
    },
    derive=dots_note,
    understands=DERIVED_KEYS | {"layer_types", "per_layer_config", "num_key_value_heads"},
    supported={"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid"), "mlp_bias": (None, False)},
    aliases=DEEPSEEK_ALIASES,
    renames=(
        *DEEPSEEK_NAMES,
        (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
        (r"\.self_attn\.k_rope_only_layernorm\.", ".self_attn.k_rotated_norm."),
    ),
    defaults={
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1024,
        "head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-5,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "bos_token_id": 151643,
        "eos_token_id": 151668,
    },
)
DOTS_NOTE_ROWS = {
    "Dots3NoteForCausalLM": DOTS_NOTE,
    # In published files, the settings of the text are at the top.
    "Dots3NoteForConditionalGeneration": replace(
        text_only(DOTS_NOTE), model_type="dots3_note", text_types=frozenset({"dots3_note_text"})
    ),
}
