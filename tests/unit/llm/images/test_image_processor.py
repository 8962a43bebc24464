"""Files of images become the pixels that transformers makes of them; what is no image, or too large, is rejected."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images import image_files
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.images.image_processor import ImageProcessor
from flambeau.llm.images.processors import read_processor
from flambeau.llm.models.vision_architecture import SiglipArchitecture
from support.pictures import claimed_png, encode, jpeg, picture
from support.vision_models import PROCESSOR, SIDE, TOKENS

ARCH = SiglipArchitecture(
    hidden_size=24,
    num_layers=1,
    num_heads=3,
    intermediate_size=40,
    image_size=SIDE,
    patch_size=4,
    norm_epsilon=1e-6,
    activation="gelu_tanh",
    num_tokens=TOKENS,
    text_size=32,
    image_id=5,
    begin_id=4,
    end_id=6,
)


def processor(folder: Path, **changes: object) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | changes))
    return read_processor(folder, ARCH)


def file(data: bytes) -> ImageFile:
    return ImageFile(data=data, name="messages[0].content[1]")


def sideways() -> bytes:
    """A photo that its camera has marked as turned by 90 degrees."""
    image, exif, buffer = picture(60, 40), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


PICTURES = {
    "jpeg": jpeg(1),
    "small": jpeg(2, 7, 5),
    "png": encode(picture(50, 90, 3), "PNG"),
    "gray": encode(picture(40, 40, 4, "L"), "PNG"),
    "transparent": encode(picture(40, 44, 5, "RGBA"), "PNG"),
    "palette": encode(picture(64, 64, 6, "P"), "GIF"),
    "webp": encode(picture(33, 32, 7), "WEBP"),
    "sideways": sideways(),
}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("changes", [{}, {"resample": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}])
def test_pixels_are_those_of_transformers(tmp_path, kind, changes):
    from transformers.image_utils import load_image
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    given = {key: value for key, value in (PROCESSOR | changes).items() if key != "image_processor_type"}
    expected = Gemma3ImageProcessorPil(**given)([load_image(Image.open(io.BytesIO(PICTURES[kind])))])["pixel_values"][0]
    found = processor(tmp_path, **changes).read(file(PICTURES[kind])).pixels()
    np.testing.assert_allclose(found.numpy(), np.asarray(expected), atol=1e-6)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not an image that can be read"),
        (b"GIF89a and nothing more", "is not an image that can be read"),
        (b"<svg/>", "PNG, JPEG, WEBP or GIF"),
        (jpeg(1)[:2000], "truncated"),
        (claimed_png(8000, 8000), "8000 x 8000 pixels"),
        (claimed_png(60_000, 60_000), "pixels"),
        (encode(picture(8, 8), "TIFF"), "is not an image that can be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, data, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        processor(tmp_path).read(file(data))
    assert caught.value.parameter == "messages[0].content[1]"
    assert "messages[0].content[1]" in str(caught.value)


def test_a_large_file_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="send at most 1000"):
        processor(tmp_path).read(file(jpeg(1)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_rescale": False}, "do_rescale"),
        ({"size": {"height": 896, "width": 896}}, "896"),
        ({"image_seq_length": 256}, "image_seq_length"),
        ({"image_mean": 0.5}, "image_mean"),
        ({"resample": 9}, "resample"),
    ],
)
def test_settings_that_are_not_supported_are_rejected_by_name(tmp_path, changes, reason):
    with pytest.raises(CheckpointError, match=reason):
        processor(tmp_path, **changes)


def test_settings_may_be_a_section_of_the_processors_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json"):
        read_processor(tmp_path, ARCH)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR, "image_seq_length": 16}))
    assert read_processor(tmp_path, ARCH) == processor(tmp_path)
