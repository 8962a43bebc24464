"""Patches of images of any size are those of transformers, and what it would refuse or do otherwise is rejected."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.grid_processor import GridProcessor
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.processors import read_processor
from flambeau.llm.models.vision_architecture import GridArchitecture
from support.grid_vision_models import PATCH, PROCESSOR
from support.pictures import claimed_png, encode, jpeg, picture

ARCH = GridArchitecture(
    hidden_size=24,
    num_layers=1,
    num_heads=2,
    intermediate_size=40,
    patch_size=PATCH,
    norm_epsilon=1e-6,
    activation="silu",
    text_size=32,
    image_id=5,
    begin_id=3,
    end_id=4,
)


def processor(folder: Path, **changes: object) -> GridProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    found = read_processor(folder, ARCH)
    assert isinstance(found, GridProcessor)
    return found


def file(data: bytes) -> ImageFile:
    return ImageFile(data=data, name="messages[0].content[1]")


def turned(orientation: int, form: str) -> bytes:
    """A photo that its camera has marked as turned."""
    image, exif, buffer = picture(60, 40), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(buffer, form, exif=exif)
    return buffer.getvalue()


PICTURES = {
    "jpeg": jpeg(1, 63, 45),
    "large": jpeg(1, 320, 280),
    "small": jpeg(2, 7, 5),
    "a pixel": encode(picture(1, 1, 2), "PNG"),
    "wide": jpeg(3, 400, 2),
    "narrow": jpeg(4, 3, 600),
    "halves": jpeg(4, 36, 44),  # 4.5 and 5.5 tokens: both are rounded to even
    "gray": encode(picture(40, 40, 4, "L"), "PNG"),
    "transparent": encode(picture(40, 44, 5, "RGBA"), "PNG"),
    "palette": encode(picture(64, 64, 6, "P"), "GIF"),
    "webp": encode(picture(33, 32, 7), "WEBP"),
    "upside down": turned(3, "JPEG"),
    "sideways": turned(6, "JPEG"),
    "sideways png": turned(8, "PNG"),
}
SIZES = {"size": {"shortest_edge": 1000, "longest_edge": 9000}, "min_pixels": None, "max_pixels": None}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("changes", [{}, {"resample": 2, "image_mean": [0.5] * 3, "image_std": [0.4, 0.5, 0.6]}, SIZES])
def test_patches_are_those_of_transformers(tmp_path, kind, changes):
    from transformers.image_utils import load_image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    given = {**PROCESSOR, **changes}
    given = {k: v for k, v in given.items() if k not in ("image_processor_type", "processor_class") and v is not None}
    expected = Qwen2VLImageProcessorPil(**given)([load_image(Image.open(io.BytesIO(PICTURES[kind])))])
    reader = processor(tmp_path, **changes)
    found = reader.read(file(PICTURES[kind]))
    assert [1, *found.grid] == expected["image_grid_thw"][0].tolist()
    np.testing.assert_allclose(found.pixels().numpy(), expected["pixel_values"], atol=1e-6)
    rows, columns = found.token_grid
    assert reader.num_tokens(file(PICTURES[kind])) == rows * columns


def test_sizes_are_those_of_transformers(tmp_path):
    """Over many sizes, with the limits of the released files."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    reader = processor(tmp_path, min_pixels=64, max_pixels=40_000)
    random = np.random.default_rng(1)
    for height, width in random.integers(1, 600, (2000, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, 2 * PATCH, 64, 40_000)
            assert reader.resized((height, width), "") == expected, (height, width)


def test_what_the_files_leave_out_is_what_transformers_has(tmp_path):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(patch_size=PATCH)
    ours = processor(tmp_path, **{key: None for key in PROCESSOR if key != "patch_size"})
    assert (ours.min_pixels, ours.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (ours.merge_size, ours.frames, ours.resample) == (theirs.merge_size, theirs.temporal_patch_size, 3)
    assert (ours.colors.mean, ours.colors.deviation) == (tuple(theirs.image_mean), tuple(theirs.image_std))


def test_older_limits_come_first(tmp_path):
    reader = processor(tmp_path, size={"shortest_edge": 5000, "longest_edge": 6000}, max_pixels=7000, min_pixels=None)
    assert (reader.min_pixels, reader.max_pixels) == (5000, 7000)
    reader = processor(tmp_path, size={"min_pixels": 5000, "max_pixels": 6000}, max_pixels=None, min_pixels=None)
    assert (reader.min_pixels, reader.max_pixels) == (5000, 6000)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not an image that can be read"),
        (b"<svg/>", "PNG, JPEG, WEBP or GIF"),
        (claimed_png(8000, 8000), "8000 x 8000 pixels"),
        (jpeg(1, 402, 2), "one side may be at most 200 times as long as the other"),
        (encode(picture(8, 8), "TIFF"), "is not an image that can be read"),
    ],
)
@pytest.mark.parametrize("method", ["read", "num_tokens"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, data, reason, method):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        getattr(processor(tmp_path), method)(file(data))
    assert caught.value.parameter == "messages[0].content[1]"
    assert "messages[0].content[1]" in str(caught.value)


def test_a_truncated_file_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match="truncated"):
        processor(tmp_path).read(file(jpeg(1)[:2000]))


def test_tokens_are_counted_without_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(JpegImageFile, "load", lambda image: pytest.fail("it was decoded"))
    assert processor(tmp_path).num_tokens(file(turned(6, "JPEG"))) == 40


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_pan_and_scan": True}, "not supported: do_pan_and_scan; remove"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"fps": 2}, "fps"),
        ({"do_resize": False}, "do_resize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"patch_size": 14}, "patch_size 14, and the network 4"),
        ({"temporal_patch_size": 1}, "temporal_patch_size 1, and the network 2"),
        ({"merge_size": 4}, "merge_size 4, and the network 2"),
        ({"size": {"height": 10, "width": 10}}, "shortest_edge and longest_edge"),
        ({"size": 100}, "shortest_edge and longest_edge"),
        ({"min_pixels": 10_000}, "shortest_edge and longest_edge"),
        ({"max_pixels": "many"}, "shortest_edge and longest_edge"),
        ({"resample": 9}, "resample"),
    ],
)
def test_settings_that_are_not_supported_are_rejected_by_name(tmp_path, changes, reason):
    with pytest.raises(CheckpointError, match=reason):
        processor(tmp_path, **changes)
