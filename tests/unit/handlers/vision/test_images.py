from __future__ import annotations

import warnings

import pytest
import torch
from PIL import Image

from flambeau.errors import BadRequest
from flambeau.handlers.vision.images import open_image, to_float_tensor, to_rgb
from support.pictures import claimed_png, encode, jpeg, picture


def test_rgb_is_left_as_it_is():
    image = open_image(encode(picture(), "PNG"))
    assert image.mode == "RGB"
    assert image.tobytes() == picture().tobytes()


def test_sixteen_bits_are_scaled_not_clipped():
    image = to_rgb(Image.new("I;16", (2, 2), 32768))
    assert image.getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("size", [0, 1, 10, 100, 1000])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_every_truncated_file_is_rejected_or_read(format, size):
    with pytest.raises(BadRequest):
        open_image(encode(picture(), format)[:size])


def test_damaged_files_never_raise_anything_else():
    good = jpeg(width=40, height=30)
    for place in range(0, len(good), 7):
        damaged = good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :]
        try:
            assert open_image(damaged).mode == "RGB"
        except BadRequest:
            pass


def test_decompression_bomb_is_rejected_as_an_error_and_as_a_warning():
    with pytest.raises(BadRequest, match="limit_max_image_pixels"):
        open_image(claimed_png(20_000, 20_000))
    with warnings.catch_warnings(action="error"), pytest.raises(BadRequest, match="limit_max_image_pixels"):
        open_image(claimed_png(10_000, 10_000))


def test_nested_lists_become_float32():
    tensor = to_float_tensor([[[1, 2.5]]], 3)
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == [[[1, 2.5]]]
    assert to_float_tensor([1, 2], None).shape == (2,)
