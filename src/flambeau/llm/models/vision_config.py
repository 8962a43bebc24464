"""config.json of Gemma 3 with images → SiglipArchitecture; the decoder has a section of its own there."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.config_keys import HARMLESS
from flambeau.llm.models.families.image_readers import ImageReader
from flambeau.llm.models.vision_architecture import PretrainedVision, SiglipArchitecture, VisionActivation

ENCODER = "siglip_vision_model"
ACTIVATIONS: dict[str, VisionActivation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys of the whole model, with their defaults.
IMAGE_KEYS = {
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}
ENCODER_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
SPATIAL_LAYERS = [12, 15, 18, 21]  # of Granite 4 Vision, which config.json may leave out
VIDEO_TOKENS = ("video_token_id", "video_token_index")
UNUSED = ("vision_use_head", "projection_dim", "projector_hidden_act")  # of a head that is not read
ALIASES = {
    "image_token_id": "image_token_index",
    "boi_token_id": "boi_token_index",
    "eoi_token_id": "eoi_token_index",
}


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the decoder: its own section, and what the whole model has beside the sections."""
    own = section(config, "text_config")
    beside = {
        key: value
        for key, value in config.items()
        if value is not None and key not in (*IMAGE_KEYS, *ALIASES, "text_config", "vision_config", "processor_class")
    }
    return {**own, **beside}


def read_vision(config: Mapping[str, Any], text_size: int) -> SiglipArchitecture:
    """The encoder of images; `text_size` is the decoder's hidden size."""
    own = {**ENCODER_DEFAULTS, **section(config, "vision_config")}
    if own.get("model_type", ENCODER) != ENCODER:
        raise CheckpointError(f"vision_config has the model_type {own['model_type']!r}; supported is {ENCODER!r}")
    check_known(own, (*ENCODER_DEFAULTS, *UNUSED))
    if own["num_channels"] != 3 or own["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(
            f"vision_config has num_channels {own['num_channels']!r} and hidden_act {own['hidden_act']!r}; supported "
            f"are 3, and one of {', '.join(ACTIVATIONS)}"
        )
    given = {ALIASES.get(key, key): value for key, value in config.items() if value is not None}
    tokens = {key: whole_number(key, given.get(key, default)) for key, default in IMAGE_KEYS.items()}
    sizes = {
        key: whole_number(f"vision_config.{key}", own[key])
        for key, value in ENCODER_DEFAULTS.items()
        if isinstance(value, int)
    }
    check_sizes(sizes, tokens["mm_tokens_per_image"])
    return SiglipArchitecture(
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        intermediate_size=sizes["intermediate_size"],
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        norm_epsilon=float(own["layer_norm_eps"]),
        activation=ACTIVATIONS[own["hidden_act"]],
        num_tokens=tokens["mm_tokens_per_image"],
        text_size=text_size,
        image_id=tokens["image_token_index"],
        begin_id=tokens["boi_token_index"],
        end_id=tokens["eoi_token_index"],
    )


def read_pretrained_vision(
    reader: ImageReader, config: Mapping[str, Any], text_size: int, scale: float
) -> PretrainedVision:
    """An encoder of transformers, which reads its settings itself."""
    named = next((key for key in ("image_token_id", "image_token_index") if config.get(key) is not None), None)
    both_ways = section(config, "text_config").get("use_bidirectional_attention") == "vision"
    return PretrainedVision(
        text_size=text_size,
        image_id=reader.image_id if named is None else whole_number(named, config[named]),
        video_id=token_of_videos(reader, config),
        reader=reader,
        scale=scale,
        more_ids=further_ids(reader, config),
        steps_per_second=steps_per_second(reader, config),
        layers_of_features=layers_of_features(config) if reader.names_layers else (),
        attends_both_ways=both_ways,
        both_ways_in_windows=both_ways,  # Gemma 4
    )


def token_of_videos(reader: ImageReader, config: Mapping[str, Any]) -> int | None:
    """None: that of images, or no videos are read."""
    if reader.videos is None or not reader.videos.token_key:
        return None
    given = [config[key] for key in VIDEO_TOKENS if config.get(key) is not None]
    return whole_number(reader.videos.token_key, given[0]) if given else reader.videos.token_id


def steps_per_second(reader: ImageReader, config: Mapping[str, Any]) -> int | None:
    """Positions of videos; None: they do not grow with seconds."""
    if reader.videos is None or not (key := reader.videos.steps_key):
        return None
    given = config.get(key)
    return reader.videos.steps_default if given is None else whole_number(key, given)


def further_ids(reader: ImageReader, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that the encoder embeds, beside that of the image."""
    if not reader.more_ids:
        return ()
    given = config.get(reader.more_ids)
    found = reader.more_default if given is None else given if isinstance(given, list) else [given]
    return tuple(whole_number(reader.more_ids, one) for one in found)


def layers_of_features(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that get features of images (Granite 4 Vision)."""
    deep, spatial = config.get("deepstack_layer_map") or [], config.get("spatial_target_layers") or SPATIAL_LAYERS
    found = sorted([*(layer for _, layer in deep), *spatial])
    if not found or len({*found}) < len(found) or not all(isinstance(layer, int) and layer >= 0 for layer in found):
        raise CheckpointError(
            "config.json needs deepstack_layer_map and spatial_target_layers with different layers of the decoder, not "
            f"{deep!r} and {spatial!r}"
        )
    return tuple(found)


def check_sizes(sizes: Mapping[str, int], num_tokens: int) -> None:
    """Raise if patches cannot be pooled to so many tokens, or heads do not divide the hidden size."""
    side = sizes["image_size"] // sizes["patch_size"]
    tokens_per_side = isqrt(num_tokens)
    if sizes["image_size"] % sizes["patch_size"] or tokens_per_side**2 != num_tokens or side % tokens_per_side:
        raise CheckpointError(
            f"an image of {sizes['image_size']} pixels in patches of {sizes['patch_size']} cannot have {num_tokens} "
            "tokens: the tokens of a side must divide its patches"
        )
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise CheckpointError(
            f"vision_config has {sizes['num_attention_heads']} heads, which do not divide {sizes['hidden_size']}"
        )


def check_known(encoder: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise for a key of vision_config that may change what the encoder computes."""
    unknown = [key for key, value in encoder.items() if value is not None and key not in known and key not in HARMLESS]
    if unknown:
        raise CheckpointError(
            f"vision_config has {', '.join(unknown)}, which are not known; they may change the result"
        )


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json has {value!r} for {key}, which must be an object")
    return value


def whole_number(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json needs {key}, a whole number from 1, not {value!r}")
    return value
