"""GridProcessor: an image in about its own size and shape → patches, as transformers' Qwen2VLImageProcessorPil does.

Pillow resizes the 8-bit image, with its bicubic filter unless the settings name another. The variant of torchvision
gives slightly different pixels.

Shapes: P patches · I numbers of one: colors, frames, rows, columns · F frames · H height · W width
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.image_files import ImageFile, open_image, size_of
from flambeau.llm.images.image_processor import (
    COMMON,
    SETTINGS,
    Colors,
    ResizedImage,
    checked_settings,
    resample_of,
)
from flambeau.llm.models.vision_architecture import GridArchitecture

MAX_RATIO = 200  # of the longer side to the shorter one
DEFAULTS: dict[str, Any] = {
    **COMMON,
    "resample": 3,  # bicubic, in Pillow's numbers
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
SUPPORTED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # despite their names, numbers of pixels
ALIASES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridProcessor:
    """Resizes an image so that whole tokens cover it, and its pixels are neither too few nor too many."""

    patch_size: int
    frames: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: int
    colors: Colors

    def read(self, file: ImageFile) -> ResizedImage:
        image = open_image(file)
        height, width = self.resized((image.height, image.width), file.name)
        resized = image.resize((width, height), resample=self.resample)
        return ResizedImage(
            pixels=lambda: self.patches(self.colors.scaled(resized)),
            grid=(height // self.patch_size, width // self.patch_size),
            merge_size=self.merge_size,
        )

    def num_tokens(self, file: ImageFile) -> int:
        height, width = self.resized(size_of(file), file.name)
        return height * width // self.token_side**2

    @property
    def token_side(self) -> int:
        """The pixels of a side of a token."""
        return self.patch_size * self.merge_size

    def resized(self, size: tuple[int, int], name: str) -> tuple[int, int]:
        """Height and width that an image is resized to. Raises InvalidRequest for one that is too narrow."""
        (height, width), side = size, self.token_side
        if max(size) > MAX_RATIO * min(size):
            raise InvalidRequest(
                f"{name} is an image of {width} x {height} pixels, and one side may be at most {MAX_RATIO} times as "
                "long as the other; cut it into several",
                name,
            )
        return fitted(size, side, self.min_pixels, self.max_pixels)

    def patches(self, pixels_HW3: NDArray[np.float32]) -> Tensor:
        """[P, I]; every frame is the image."""
        frames_FHW3 = np.broadcast_to(pixels_HW3, (self.frames, *pixels_HW3.shape))
        return patches_of(frames_FHW3, self.frames, self.patch_size, self.merge_size)


def fitted(
    size: tuple[int, int],
    side: int,
    min_pixels: int,
    max_pixels: int,
    *,
    num_frames: int = 1,
    rounded_frames: int = 1,
) -> tuple[int, int]:
    """Height and width in multiples of a side, with neither too few nor too many pixels in all frames."""
    height, width = size
    sides = [round(length / side) * side for length in size]
    pixels = rounded_frames * sides[0] * sides[1]
    if pixels > max_pixels:
        factor = sqrt(num_frames * height * width / max_pixels)
        sides = [max(side, floor(length / factor / side) * side) for length in size]
    elif pixels < min_pixels:
        factor = sqrt(min_pixels / (num_frames * height * width))
        sides = [ceil(length * factor / side) * side for length in size]
    return sides[0], sides[1]


def patches_of(pixels_FHW3: NDArray[np.float32], frames: int, patch: int, merge: int) -> Tensor:
    """[P, I]: the patches of a token follow each other, and those of so many frames are one."""
    number, height, width, _ = pixels_FHW3.shape
    side = patch * merge
    squares = pixels_FHW3.reshape(
        number // frames, frames, height // side, merge, patch, width // side, merge, patch, 3
    )
    # Steps, rows and columns of tokens, of their patches, colors, frames, rows and columns.
    ordered = squares.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return torch.from_numpy(ordered.reshape(-1, 3 * frames * patch * patch))


def read_grid_processor(
    folder: Path, arch: GridArchitecture, settings: Mapping[str, Any] | None = None
) -> GridProcessor:
    """The processor of a checkpoint; raises CheckpointError for settings that it does not know."""
    defaults = DEFAULTS if settings is None else {**DEFAULTS, **sides_of(arch)}
    given = checked_settings(folder, defaults, SUPPORTED, ("size", *ALIASES), settings)
    for key, value in sides_of(arch).items():
        if given[key] != value:
            raise CheckpointError(f"{SETTINGS} has {key} {given[key]!r}, and the network {value}")
    limits = read_limits(given)
    return GridProcessor(
        patch_size=arch.patch_size,
        frames=arch.frames,
        merge_size=arch.merge_size,
        min_pixels=limits["shortest_edge"],
        max_pixels=limits["longest_edge"],
        resample=resample_of(given["resample"]),
        colors=Colors.of(given),
    )


def sides_of(arch: GridArchitecture) -> dict[str, int]:
    return {"patch_size": arch.patch_size, "temporal_patch_size": arch.frames, "merge_size": arch.merge_size}


def read_limits(given: Mapping[str, Any]) -> dict[str, int]:
    """The fewest and the most pixels; `min_pixels` and `max_pixels` come before those of `size`."""
    size = given.get("size", {})
    size = {ALIASES.get(key, key): value for key, value in size.items()} if isinstance(size, Mapping) else {"": size}
    size = {key: value for key, value in size.items() if value is not None}
    own = {edge: given[key] for key, edge in ALIASES.items() if key in given}
    limits = {**LIMITS, **size, **own}
    is_valid = limits.keys() == LIMITS.keys() and all(type(value) is int and value > 0 for value in limits.values())
    if not is_valid or limits["shortest_edge"] > limits["longest_edge"]:
        raise CheckpointError(
            f"{SETTINGS}: size must have shortest_edge and longest_edge, the fewest and the most pixels of an image, "
            f"not {given.get('size')!r} with min_pixels {given.get('min_pixels')!r} and max_pixels "
            f"{given.get('max_pixels')!r}"
        )
    return limits
