"""Reads images and nested lists from requests; invalid ones raise BadRequest."""

from __future__ import annotations

import io
from typing import Any

import torch

from flambeau.errors import BadRequest

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise ImportError("image handlers need Pillow: pip install 'flambeau[vision]'") from error

TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def allow_any_size() -> None:
    """Remove PIL's limit on the number of pixels."""
    Image.MAX_IMAGE_PIXELS = None


def open_image(data: bytes | bytearray | memoryview, *, as_rgb: bool = True) -> Image.Image:
    """Decode an image fully; to RGB, or with its own channels."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        return to_rgb(image) if as_rgb else image
    except TOO_LARGE:
        raise BadRequest(
            f"the image has more pixels than the limit (about {2 * (Image.MAX_IMAGE_PIXELS or 0):,}); "
            "send a smaller one, or set limit_max_image_pixels=false"
        ) from None
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise BadRequest(f"the {len(data)} bytes are not an image in a format that can be read") from None
    except Exception as error:  # decoders raise any exception for damaged files
        raise BadRequest(f"the image cannot be decoded: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to three channels: gray is repeated, alpha is dropped."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to the lowest 8
        image = image.convert("I").point(lambda value: value * (1 / 256))
    return image.convert("RGB")


def to_float_tensor(values: Any, dimensions: int | None) -> torch.Tensor:
    """Nested lists of numbers as a tensor; `dimensions` is their required number, if any."""
    if not isinstance(values, (list, tuple, torch.Tensor)):
        kind = "an object" if isinstance(values, dict) else type(values).__name__
        raise BadRequest(f"send an image as bytes, as base64 text or as nested lists of numbers, not as {kind}")
    try:
        tensor = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRequest(f"the nested lists are not a tensor: {error}") from None
    if dimensions is not None and tensor.dim() != dimensions:
        raise BadRequest(
            f"the nested lists must have {dimensions} dimensions (channels, height, width); "
            f"they have {tensor.dim()}: {[*tensor.shape]}"
        )
    if tensor.numel() == 0:
        raise BadRequest("the nested lists hold no numbers")
    if not torch.isfinite(tensor).all():
        raise BadRequest("the nested lists hold NaN, Infinity or a number beyond float32")
    return tensor
