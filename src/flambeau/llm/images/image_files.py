"""ImageFile: the file of an image in a request; opened here, with limits that are checked before it is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.transformers_package import first_lines

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20 << 20  # of a file
MAX_PIXELS = 50_000_000  # 150 MB while it is resized
MIN_SIDE = 4  # pixels that processors of transformers need: a side of 1 or 3 could be one of channels
SMALL_SIDE, MAX_RATIO = 64, 20  # an image below, or with sides further apart, is too small where encoders fail
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

ORIENTATION, SWAPPED = 0x0112, range(5, 9)  # what a camera notes; values where height and width are swapped


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """The file of an image in a request; `name` is its place there."""

    data: bytes
    name: str


def open_image(file: ImageFile) -> Image:
    """The image in RGB, upright; of several frames the first."""
    from PIL import ImageOps

    with opened(file) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def size_of(file: ImageFile) -> tuple[int, int]:
    """Height and width of the image, upright, which is not decoded unless what its camera noted is at its end."""
    with opened(file) as image:
        is_swapped = image.getexif().get(ORIENTATION, 1) in SWAPPED
        return (image.width, image.height) if is_swapped else (image.height, image.width)


@contextmanager
def opened(file: ImageFile) -> Iterator[Image]:
    """The image before it is decoded. Raises InvalidRequest, also for what fails later, while it is used."""
    from PIL import Image, UnidentifiedImageError

    if len(file.data) > MAX_BYTES:
        raise InvalidRequest(
            f"{file.name} is an image of {len(file.data)} bytes; send at most {MAX_BYTES}, for example as a JPEG",
            file.name,
        )
    try:
        image = Image.open(io.BytesIO(file.data), formats=FORMATS)
        check_pixels(image.size, file.name)
        yield image
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


def check_side(file: ImageFile) -> None:
    """Raise for an image of so few pixels that transformers may fail, or warn of them, in its own words."""
    if min(size_of(file)) < MIN_SIDE:
        raise too_small(file)


def too_small(file: ImageFile) -> InvalidRequest:
    height, width = size_of(file)
    return InvalidRequest(
        f"{file.name} is an image of {width} x {height} pixels, which is too small or too narrow for this model; send "
        "a larger one",
        file.name,
    )


def not_encoded(file: ImageFile, error: Exception) -> InvalidRequest:
    """For an image that a processor or an encoder of transformers failed for."""
    height, width = size_of(file)
    if min(height, width) < SMALL_SIDE or max(height, width) > MAX_RATIO * min(height, width):
        return too_small(file)
    return InvalidRequest(
        f"{file.name} is an image of {width} x {height} pixels, which the model cannot encode: {first_lines(error)}; "
        "send one of another size",
        file.name,
    )


def too_large(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is an image of {what}; send at most {MAX_PIXELS} pixels: make it smaller", name)
