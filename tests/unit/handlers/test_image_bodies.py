"""Every kind of image, and bodies that are none: for the built-in classifier, and for the handler of the tutorial."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from flambeau.errors import BadRequest
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.vision_handlers import ImageClassifier, open_image
from flambeau.testing.context import new_handler_context
from support.packing import NETWORKS
from support.pictures import encode, jpeg, picture


class CustomImageHandler(BaseHandler):
    image_processing = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )

    def preprocess(self, data):
        images = []
        for row in data:
            image_data = row.get("data") or row.get("body")
            image = Image.open(io.BytesIO(image_data))
            image = self.image_processing(image)
            images.append(image)
        return torch.stack(images).to(self.device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "net.py").write_text((NETWORKS / "tiny_classifier.py").read_text())
    return folder


def loaded(kind, folder):
    handler = kind()
    handler.initialize(new_handler_context(model_dir=folder, model_file="net.py"))
    return handler


@pytest.fixture(scope="module")
def built_in(folder):
    return loaded(ImageClassifier, folder)


@pytest.fixture(scope="module")
def custom(folder):
    return loaded(CustomImageHandler, folder)


def handle(handler, body):
    context = new_handler_context(requests=[body])
    return handler.handle(context.rows, context)


def animated():
    frames = [picture(seed=seed).convert("P") for seed in range(3)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def rotated(orientation=6):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    picture(60, 40).save(file, "JPEG", exif=exif)
    return file.getvalue()


SIXTEEN_BITS = encode(Image.fromarray((np.arange(90_000) % 65_536).reshape(300, 300).astype(np.uint16)), "PNG")
PICTURES = {
    "gray": encode(picture(mode="L")),
    "palette": encode(picture(mode="P"), "PNG"),
    "CMYK": encode(picture(mode="CMYK")),
    "16-bit": SIXTEEN_BITS,
    "bilevel": encode(picture(mode="1"), "PNG"),
    "gray and alpha": encode(picture(mode="LA"), "PNG"),
    "transparent": encode(picture(mode="RGBA"), "PNG"),
    "animated": animated(),
}
TRUNCATED = [jpeg()[:4000], encode(picture(), "PNG")[:4000], encode(picture(), "TIFF")[:1000]]
OTHERS = [b"hello", b"", encode(picture(), "PNG")[:40], {"a": 1}, [1, 2], "abc", 5, None]


@pytest.mark.parametrize("kind", PICTURES)
def test_picture_of_any_mode_is_classified_by_the_built_in_handler(built_in, kind):
    assert len(handle(built_in, PICTURES[kind])[0]) == 5


@pytest.mark.parametrize("kind", PICTURES)
def test_picture_of_other_channels_is_refused_by_a_handler_that_takes_three(custom, kind):
    with pytest.raises(BadRequest, match=r"other channels than the handler expects .* an RGB image of 8 bits"):
        handle(custom, PICTURES[kind])


@pytest.mark.parametrize("body", [jpeg(), rotated(), encode(picture(), "WEBP")], ids=["jpeg", "rotated", "webp"])
def test_color_picture_is_taken_by_both(built_in, custom, body):
    assert handle(built_in, body)
    assert handle(custom, body)


@pytest.mark.parametrize("body", TRUNCATED, ids=["jpeg", "png", "tiff"])
def test_truncated_file_is_refused_by_both(built_in, custom, body):
    for handler in (built_in, custom):
        with pytest.raises(BadRequest, match="cannot be decoded: image file is truncated"):
            handle(handler, body)


@pytest.mark.parametrize("body", OTHERS, ids=[repr(body)[:12] for body in OTHERS])
def test_body_that_is_no_image_is_refused_by_both(built_in, custom, body):
    for handler in (built_in, custom):
        with pytest.raises(BadRequest):
            handle(handler, body)


def test_json_for_a_handler_that_reads_bytes_is_answered_with_the_remedy(custom):
    with pytest.raises(BadRequest, match="the body is a JSON object, and the handler reads bytes; send the file"):
        handle(custom, {"a": 1})


def test_mistake_of_the_handler_itself_stays_one(folder):
    class Mistaken(CustomImageHandler):
        def postprocess(self, data):
            return io.BytesIO({})  # the same words as for a body

    with pytest.raises(TypeError, match="bytes-like"):
        handle(loaded(Mistaken, folder), jpeg())


def test_rotated_photograph_is_upright():
    assert open_image(rotated()).size == (40, 60)
    assert open_image(rotated(1)).size == (60, 40)


def test_data_of_a_json_body_is_understood(built_in, folder):
    expected = handle(built_in, jpeg())
    assert handle(built_in, {"data": base64.b64encode(jpeg()).decode()}) == expected
    plain = loaded(BaseHandler, folder)
    numbers = torch.rand(3, 16, 16).tolist()
    assert handle(plain, {"data": numbers}) == handle(plain, numbers)
    assert handle(plain, json.dumps({"data": numbers}).encode()) == handle(plain, numbers)
    with pytest.raises(BadRequest, match="the object has 'pixels'"):
        handle(plain, {"pixels": numbers})


def test_explanation_that_is_not_there_says_what_to_add(custom):
    with pytest.raises(BadRequest, match="CustomImageHandler has no explanations; add get_insights"):
        custom.explain_handle(None, [{"body": jpeg()}])


def test_target_of_an_explanation_may_be_in_the_json_body(folder):
    class Explained(BaseHandler):
        def get_insights(self, inputs, raw, target):
            return [[raw, target]]

    body = {"data": [[[1.0]], [[1.0]], [[1.0]]], "target": 2}
    explained = loaded(Explained, folder).explain_handle
    assert explained(None, [{"body": body}]) == [[body, 2]]
    assert explained(None, [{"data": b"x", "target": b"1"}]) == [[b"x", b"1"]]
    assert explained(None, ["plain"]) == [["plain", 0]]


def test_empty_body_is_called_empty_by_both(built_in, custom):
    for handler in (built_in, custom):
        with pytest.raises(BadRequest, match="is empty"):
            handle(handler, b"")
