"""ImageProcessor: the file of an image → pixels, as the checkpoint's preprocessor_config.json says.

Shapes: H height · W width
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.json_files import read_object
from flambeau.llm.models.architecture import VisionArchitecture

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20 << 20  # of a file
MAX_PIXELS = 50_000_000  # 150 MB while it is resized
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SETTINGS = "preprocessor_config.json"
DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_pan_and_scan": False,
    "resample": 2,  # bilinear, in Pillow's numbers
    "rescale_factor": 1 / 255,
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
class ImageFile:
    """The file of an image in a request; `name` is its place there."""

    data: bytes
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """Resizes an image to the size that the network takes, and scales its colors."""

    size: int  # pixels of a side
    resample: int
    rescale_factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def pixels(self, file: ImageFile) -> Tensor:
        """[3, H, W]; raises InvalidRequest for a file that is not an image, or too large."""
        image = open_image(file).resize((self.size, self.size), resample=self.resample)
        scaled = np.asarray(image).astype(np.float64) * self.rescale_factor
        mean, deviation = np.array(self.mean, np.float32), np.array(self.deviation, np.float32)
        pixels_HW3: NDArray[np.float32] = (scaled.astype(np.float32) - mean) / deviation
        return torch.from_numpy(pixels_HW3).permute(2, 0, 1).contiguous()


def read_processor(folder: Path, arch: VisionArchitecture) -> ImageProcessor:
    """The processor of a checkpoint; raises CheckpointError for settings that it does not know."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise CheckpointError("a model that reads images needs Pillow: pip install pillow") from None
    own = {key: value for key, value in read_settings(folder).items() if value is not None}
    known = (*DEFAULTS, *CHECKED, *WITHOUT_EFFECT)
    if unknown := [key for key in own if key not in known]:
        raise CheckpointError(f"{folder / SETTINGS} has {', '.join(unknown)}, which are not known here")
    given = {**DEFAULTS, **own}
    for key, value in SUPPORTED.items():
        if given[key] != value:
            raise CheckpointError(f"{SETTINGS}: {key} {given[key]!r} is not supported; supported is {value!r}")
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
    return ImageProcessor(
        size=arch.image_size,
        resample=resample_of(given["resample"]),
        rescale_factor=float(given["rescale_factor"]),
        mean=three_numbers("image_mean", given["image_mean"]),
        deviation=three_numbers("image_std", given["image_std"]),
    )


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


def open_image(file: ImageFile) -> Image:
    """The image in RGB, upright; of several frames the first."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(file.data) > MAX_BYTES:
        raise InvalidRequest(
            f"{file.name} is an image of {len(file.data)} bytes; send at most {MAX_BYTES}, for example as a JPEG",
            file.name,
        )
    try:
        image = Image.open(io.BytesIO(file.data), formats=FORMATS)
        check_pixels(image.size, file.name)
        return ImageOps.exif_transpose(image).convert("RGB")
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large(file.name, f"more than {MAX_PIXELS} pixels") from None
    except Exception as error:  # a broken file can fail in any way
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({str(error)[:100]})"
        raise InvalidRequest(
            f"{file.name} is not an image that can be read{reason}; send a whole file of the format "
            f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
            file.name,
        ) from None


def check_pixels(size: tuple[int, int], name: str) -> None:
    """Raise for an image that would take much memory, before its pixels are decoded."""
    if size[0] * size[1] > MAX_PIXELS:
        raise too_large(name, f"{size[0]} x {size[1]} pixels")


def too_large(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is an image of {what}; send at most {MAX_PIXELS} pixels: make it smaller", name)
