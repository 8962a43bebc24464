"""Family: the settings of a class of models that its config.json leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flambeau.llm.models.families.image_readers import ImageReader
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.families.sound_readers import SoundReader

Config = Mapping[str, Any]
# The layers with a window, unless `layer_types` names them: `named` has no others, `pattern` leaves out every nth.
WindowedLayers = Literal["none", "named", "all", "late", "unrotated", "even", "pattern"]


def as_is(config: Config) -> Config:
    return config


VisionKind = Literal["siglip", "qwen_2", "qwen_2.5", "qwen_3", "qwen_3.5"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Settings of a class of models that its config.json does not contain."""

    model_type: str
    text_section: str = ""  # of config.json: the section of the language model, in models with further encoders
    text_types: frozenset[str] = frozenset()  # model_types of that section whose settings are here, not in another row
    arrange: Callable[[Config], Config] = as_is  # config.json in the form of others; first of all
    qkv_bias: bool | None = None  # None: set by `attention_bias`
    output_bias: bool | None = None
    qk_norm: bool = False
    windowed: WindowedLayers = "none"  # the layers limited to `sliding_window`
    switches_window: bool = True  # `use_sliding_window` turns the window on
    names_layers: bool = True  # `layer_types` names the layers with a window
    rope_sections: tuple[str, str] = ("full_attention", "sliding_attention")  # of rope parameters, with and without
    attention_factor: float | None = None  # of YaRN where config.json has none; None: computed from the factor
    has_local_rope: bool = False  # layers with a window have rope parameters of their own
    rotates_windows: bool = False  # of a model with windows, only layers with one have rotary positions
    experts: bool = False
    defaults: Config = field(default_factory=dict)  # of keys that config.json may leave out
    parts: Config = field(default_factory=dict)  # fields of Architecture that differ from Llama's
    derive: Callable[[Config], Config] | None = None  # more of them, from config.json
    understands: frozenset[str] = frozenset()  # keys that `derive` reads, which are not supported elsewhere
    epsilon_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    renames: Renames = ()  # of tensors: patterns and what replaces them
    aliases: Mapping[str, str] = field(default_factory=dict)  # of keys: the family's own names → Llama's
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the values of keys that are supported
    has_kv_heads: bool = True  # False: as many as heads, whatever config.json says
    is_rotated: bool = True  # False: no layer has rotary positions
    mlp_ratio: int | None = None  # the default of the intermediate size, in hidden sizes
    dequantizes: tuple[str, ...] = ()  # quantization methods whose weights are dequantized
    vision: VisionKind | None = None  # the encoder of images, whose settings are under `vision_config`
    images: ImageReader | None = None  # what transformers encodes images with
    sounds: SoundReader | None = None  # what transformers encodes sounds with
    scales_images: bool = False  # the scale of embeddings of tokens is also that of images
