"""config.json of Qwen2-VL, Qwen2.5-VL and Qwen3-VL → GridArchitecture, and the settings of their decoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.vision_architecture import GridArchitecture, VisionActivation
from flambeau.llm.models.vision_config import check_known, section, whole_number

ACTIVATIONS: dict[str, VisionActivation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
TOKENS = {  # of the whole model, with their defaults
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "video_token_id": 151656,
}
LATER_TOKENS = {
    "image_token_id": 248056,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "video_token_id": 248057,
}
UNUSED_TOKENS = ("vision_token_id",)
# Where the decoder has a section of its own, these are said of the whole checkpoint.
OUTER_KEYS = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")
COMMON = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ALIASES = {"in_chans": "in_channels", "num_attention_heads": "num_heads"}
# Old files repeat the size of patches, and Qwen2-VL's say tokens_per_second, too.
UNUSED = ("spatial_patch_size", "tokens_per_second", "rope_parameters")
NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class EncoderKind:
    """What one kind of encoder has, and which keys its settings have."""

    model_types: tuple[str, ...]  # names of it, old and new
    defaults: Mapping[str, Any]
    inner: str  # the key of the hidden size …
    outer: str  # … and of the decoder's
    tokens: Mapping[str, int] = field(default_factory=lambda: TOKENS)
    parts: Mapping[str, Any] = field(default_factory=dict)


ENCODERS = {
    "qwen_2": EncoderKind(
        model_types=("qwen2_vl_vision", "qwen2_vl"),
        defaults={**COMMON, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4},
        inner="embed_dim",
        outer="hidden_size",
    ),
    "qwen_2.5": EncoderKind(
        model_types=("qwen2_5_vl_vision", "qwen2_5_vl"),
        defaults={
            **COMMON,
            "hidden_size": 3584,
            "out_hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 4,
        },
        inner="hidden_size",
        outer="out_hidden_size",
        parts={"norm": "rms", "has_gate": True, "video_times": "seconds"},
    ),
    "qwen_3": EncoderKind(
        model_types=("qwen3_vl_vision", "qwen3_vl", "qwen3_vl_moe_vision", "qwen3_vl_moe"),
        defaults={
            **COMMON,
            "depth": 27,
            "patch_size": 16,
            "hidden_size": 1152,
            "out_hidden_size": 3584,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        inner="hidden_size",
        outer="out_hidden_size",
        parts={"video_times": "texts"},
    ),
}
_QWEN_3 = ENCODERS["qwen_3"]
ENCODERS["qwen_3.5"] = replace(
    _QWEN_3,
    model_types=("qwen3_5_vision", "qwen3_5", "qwen3_5_moe_vision", "qwen3_5_moe"),
    defaults={**_QWEN_3.defaults, "deepstack_visual_indexes": []},
    tokens=LATER_TOKENS,
)


def grid_decoder_config(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the decoder: its own section, or in older files all that are beside the encoder's.

    Files of one version have both; transformers then reads the section. Whether embeddings are tied is said outside of
    it; files of the older models may have it inside only.
    """
    own = {key: value for key, value in section(config, "text_config").items() if value is not None}
    beside = {key: value for key, value in config.items() if value is not None}
    inside, outside = own.get("tie_word_embeddings"), beside.get("tie_word_embeddings")
    is_newer = kind in ("qwen_3", "qwen_3.5")
    is_tied = bool(outside if is_newer and outside is not None else inside or outside)
    outer = {key: beside[key] for key in OUTER_KEYS if key in beside}
    apart = (*TOKENS, *UNUSED_TOKENS, "text_config", "vision_config", "processor_class")
    merged = {**beside, **own, **outer, "tie_word_embeddings": is_tied}
    return {key: value for key, value in merged.items() if key not in apart}


def read_grid_vision(kind: str, config: Mapping[str, Any], text_size: int, num_layers: int) -> GridArchitecture:
    """The encoder of images of a decoder with this hidden size and number of layers."""
    encoder = ENCODERS[kind]
    own = own_settings(encoder, section(config, "vision_config"))
    sizes = {
        key: whole_number(f"vision_config.{key}", own[key])
        for key, value in encoder.defaults.items()
        if isinstance(value, int)
    }
    check_sizes(encoder, sizes, text_size)
    tokens = {key: whole_number(key, config.get(key) or default) for key, default in encoder.tokens.items()}
    hidden, depth = sizes[encoder.inner], sizes["depth"]
    deep = layer_numbers("deepstack_visual_indexes", own, depth)
    if deep and not encoder.defaults["deepstack_visual_indexes"]:
        raise CheckpointError(f"deepstack_visual_indexes {[*deep]} are not supported for this family")
    if len(deep) > num_layers:
        raise CheckpointError(f"deepstack_visual_indexes has {len(deep)} layers, and the decoder only {num_layers}")
    return GridArchitecture(
        hidden_size=hidden,
        num_layers=depth,
        num_heads=sizes["num_heads"],
        intermediate_size=sizes.get("intermediate_size") or hidden * sizes["mlp_ratio"],
        patch_size=sizes["patch_size"],
        norm_epsilon=NORM_EPSILON,
        activation=ACTIVATIONS[own["hidden_act"]],
        text_size=text_size,
        image_id=tokens["image_token_id"],
        begin_id=tokens["vision_start_token_id"],
        end_id=tokens["vision_end_token_id"],
        video_id=tokens["video_token_id"],
        steps_per_second=sizes.get("tokens_per_second", 1),
        merge_size=sizes["spatial_merge_size"],
        frames=sizes["temporal_patch_size"],
        rope_theta=rope_theta(own),
        window=window(sizes),
        full_layers=frozenset(layer_numbers("fullatt_block_indexes", own, depth)),
        num_positions=num_positions(sizes),
        deep_layers=deep,
        **encoder.parts,
    )


def own_settings(encoder: EncoderKind, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an encoder by their newer names, with defaults; raises CheckpointError for those of others."""
    named = {ALIASES.get(key, key): value for key, value in given.items() if value is not None}
    own = {**encoder.defaults, **named}
    if own.get("model_type", encoder.model_types[0]) not in encoder.model_types:
        raise CheckpointError(
            f"vision_config has the model_type {own['model_type']!r}; supported is {encoder.model_types[0]!r}"
        )
    check_known(own, (*encoder.defaults, *UNUSED))
    if own["in_channels"] != 3 or own["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(
            f"vision_config has {own['in_channels']!r} channels and hidden_act {own['hidden_act']!r}; supported are 3, "
            f"and one of {', '.join(ACTIVATIONS)}"
        )
    return own


def check_sizes(encoder: EncoderKind, sizes: Mapping[str, int], text_size: int) -> None:
    """Raise CheckpointError for sizes that do not fit each other, or the decoder."""
    hidden, heads = sizes[encoder.inner], sizes["num_heads"]
    if hidden % heads or hidden // heads % 4:
        raise CheckpointError(
            f"vision_config has {heads} heads of {hidden} dimensions: each must have the same number, a multiple of 4"
        )
    if sizes[encoder.outer] != text_size:
        raise CheckpointError(
            f"vision_config has {encoder.outer} {sizes[encoder.outer]}, and the decoder's hidden size is {text_size}"
        )


def layer_numbers(key: str, encoder: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """Numbers of the encoder's layers, each once."""
    numbers = encoder.get(key) or []
    is_list = isinstance(numbers, list) and all(isinstance(n, int) and 0 <= n < depth for n in numbers)
    if not is_list or len(set(numbers)) != len(numbers):
        raise CheckpointError(f"vision_config.{key} must be a list of different layers from 0 to {depth - 1}")
    return tuple(numbers)


def window(sizes: Mapping[str, int]) -> int:
    """Patches of a side of a window, which holds whole tokens; 0: there are none."""
    if "window_size" not in sizes:
        return 0
    merge = sizes["spatial_merge_size"]
    patches = sizes["window_size"] // merge // sizes["patch_size"] * merge
    if not patches:
        raise CheckpointError(
            f"vision_config.window_size {sizes['window_size']} is smaller than the patches of one token"
        )
    return patches


def num_positions(sizes: Mapping[str, int]) -> int:
    number = sizes.get("num_position_embeddings", 0)
    if isqrt(number) ** 2 != number:
        raise CheckpointError(f"vision_config.num_position_embeddings {number} is not a square")
    return number


def rope_theta(encoder: Mapping[str, Any]) -> float:
    """Of the rows and columns of patches; files before transformers 5 do not name it."""
    parameters = section(encoder, "rope_parameters")
    kind, theta = parameters.get("rope_type", "axial"), parameters.get("rope_theta", 10000.0)
    is_known = kind == "axial" and parameters.keys() <= {"rope_type", "rope_theta"}
    if not is_known or not isinstance(theta, int | float) or theta <= 0:
        raise CheckpointError(
            f"vision_config.rope_parameters {dict(parameters)!r} are not supported; supported is the type 'axial' with "
            "rope_theta"
        )
    return float(theta)
