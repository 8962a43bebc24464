"""ImageProcessor: the file of an image → pixels, as the checkpoint's preprocessor_config.json says.

Shapes: H height · W width · S pixels of a side
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.errors import CheckpointError
from flambeau.llm.images.image_files import ImageFile, open_image
from flambeau.llm.json_files import read_object
from flambeau.llm.models.vision_architecture import SiglipArchitecture

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS = "preprocessor_config.json"
COMMON = {  # of all kinds of processors
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
}
DEFAULTS: dict[str, Any] = {
    **COMMON,
    "do_pan_and_scan": False,
    "resample": 2,  # bilinear, in Pillow's numbers
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SUPPORTED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_pan_and_scan": False,
}
CHECKED = ("size", "image_seq_length")  # against the network
WITHOUT_EFFECT = (
    "image_processor_type",
    "processor_class",
    "feature_extractor_type",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate",
    "default_to_square",
    "return_tensors",
    "input_data_format",
    "data_format",
    "device",
    "disable_grouping",
    "return_metadata",
    "model_input_names",
    "_valid_processor_keys",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizedImage:
    """An image as its encoder takes it, in 8 bits until its pixels are asked for."""

    pixels: Callable[[], Tensor]  # [3, S, S], or patches with their numbers side by side
    grid: tuple[int, int] | None = None  # rows and columns of patches, which become those of tokens by merging
    merge_size: int = 1  # patches of a side of a token
    more: Mapping[str, Any] = field(default_factory=dict)  # what an encoder of transformers takes besides
    num_tokens: int | None = None  # that stand for it in a prompt, if they were counted

    @property
    def token_grid(self) -> tuple[int, int] | None:
        return None if self.grid is None else (self.grid[0] // self.merge_size, self.grid[1] // self.merge_size)


class ImageProcessor(Protocol):
    """Reads the files of images."""

    def read(self, file: ImageFile) -> ResizedImage:
        """Raises InvalidRequest for a file that is not an image, or not of a size that is read."""

    def num_tokens(self, file: ImageFile) -> int:
        """How many tokens the image takes in a prompt. Raises InvalidRequest if it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colors:
    """How numbers from 0 to 255 are scaled."""

    rescale_factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        return cls(
            rescale_factor=float(settings["rescale_factor"]),
            mean=three_numbers("image_mean", settings["image_mean"]),
            deviation=three_numbers("image_std", settings["image_std"]),
        )

    def scaled(self, image: Image | NDArray[np.uint8]) -> NDArray[np.float32]:
        """[H, W, 3]."""
        numbers = np.asarray(image).astype(np.float64) * self.rescale_factor
        mean, deviation = np.array(self.mean, np.float32), np.array(self.deviation, np.float32)
        found: NDArray[np.float32] = (numbers.astype(np.float32) - mean) / deviation
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedProcessor:
    """Resizes an image to the one size that the network takes."""

    size: int  # pixels of a side
    tokens: int  # of each image
    resample: int
    colors: Colors

    def read(self, file: ImageFile) -> ResizedImage:
        image = open_image(file).resize((self.size, self.size), resample=self.resample)
        return ResizedImage(pixels=lambda: torch.from_numpy(self.colors.scaled(image)).permute(2, 0, 1).contiguous())

    def num_tokens(self, file: ImageFile) -> int:
        return self.tokens


def read_fixed_processor(
    folder: Path, arch: SiglipArchitecture, settings: Mapping[str, Any] | None = None
) -> FixedProcessor:
    """The processor of a checkpoint; raises CheckpointError for settings that it does not know."""
    given = checked_settings(folder, DEFAULTS, SUPPORTED, CHECKED, settings)
    size = {"height": arch.image_size, "width": arch.image_size}
    if given.get("size", size) != size:
        raise CheckpointError(
            f"{SETTINGS} has the size {given['size']!r}, and the network takes {arch.image_size} pixels"
        )
    if given.get("image_seq_length", arch.num_tokens) != arch.num_tokens:
        raise CheckpointError(
            f"{SETTINGS} has image_seq_length {given['image_seq_length']!r}, and config.json mm_tokens_per_image "
            f"{arch.num_tokens}"
        )
    return FixedProcessor(
        size=arch.image_size,
        tokens=arch.num_tokens,
        resample=resample_of(given["resample"]),
        colors=Colors.of(given),
    )


def checked_settings(
    folder: Path,
    defaults: Mapping[str, Any],
    supported: Mapping[str, Any],
    others: tuple[str, ...],
    settings: Mapping[str, Any] | None = None,
    name: str = SETTINGS,
) -> dict[str, Any]:
    """The settings of a folder, or those that are given, with defaults; `others` are further keys that are known.

    Raises CheckpointError for all else.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise CheckpointError("a model that reads images needs Pillow: pip install pillow") from None
    read = read_settings(folder) if settings is None else settings
    own = {key: value for key, value in read.items() if value is not None}
    known = (*defaults, *others, *WITHOUT_EFFECT)
    if unknown := [key for key in own if key not in known]:
        raise CheckpointError(
            f"{folder / name} has settings that are not supported: {', '.join(unknown)}; remove "
            "them if the model was trained without them"
        )
    given = {**defaults, **own}
    for key, value in supported.items():
        if given[key] != value:
            raise CheckpointError(f"{name}: {key} {given[key]!r} is not supported; supported is {value!r}")
    return given


def read_settings(folder: Path) -> Mapping[str, Any]:
    """preprocessor_config.json, or the section of processor_config.json where newer checkpoints have it."""
    if (folder / SETTINGS).is_file():
        return read_object(folder / SETTINGS, CheckpointError)
    newer = folder / "processor_config.json"
    section = read_object(newer, CheckpointError).get("image_processor") if newer.is_file() else None
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"{folder} has no {SETTINGS}, which says how images are read; copy it from the model's source"
        )
    return section


def resample_of(value: Any) -> int:
    if value not in (0, 1, 2, 3, 4, 5):
        raise CheckpointError(f"{SETTINGS}: resample must be one of Pillow's filters, 0 to 5, not {value!r}")
    return int(value)


def three_numbers(key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, int | float) for one in value):
        raise CheckpointError(f"{SETTINGS}: {key} must be three numbers, not {value!r}")
    return tuple(float(one) for one in value)
