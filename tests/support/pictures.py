"""Pictures made on the spot: smooth colors with noise, so that their files look like photographs to a decoder."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def picture(width: int = 320, height: int = 280, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture; the same seed gives the same one."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = random.uniform(1, 6, (3, 2))
    channels = [np.sin(a * x + b * y + i) * 90 + 128 for i, (a, b) in enumerate(waves)]
    pixels = np.stack(channels, axis=2) + random.normal(0, 12, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, format: str = "JPEG") -> bytes:
    """The file of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def jpeg(seed: int = 0, width: int = 320, height: int = 280) -> bytes:
    """A JPEG file."""
    return encode(picture(width, height, seed))


def claimed_png(width: int, height: int) -> bytes:
    """A PNG file that says it is that large, and holds almost nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
