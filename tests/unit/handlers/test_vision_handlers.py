from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch
from PIL import Image
from torchvision import transforms

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.vision_handlers import (
    ImageClassifier,
    ImageSegmenter,
    ObjectDetector,
    VisionHandler,
    open_image,
    takes_a_list,
    to_float_tensor,
    to_rgb,
)
from flambeau.worker.context import Context
from support.packing import NETWORKS
from support.pictures import claimed_png, encode, jpeg, picture


@pytest.fixture
def context(tmp_path):
    def context(network: str, *, limit: bool = True, dtype: str | None = None, **options):
        (tmp_path / f"{network}.py").write_text((NETWORKS / f"{network}.py").read_text())
        manifest = {"model": {"modelFile": f"{network}.py"}}
        config = {"handler": options, "dtype": dtype}
        return Context("m", str(tmp_path), manifest, 1, None, "1", limit, model_yaml_config=config)

    return context


@pytest.fixture
def detector(context):
    handler = ObjectDetector()
    handler.initialize(context("tiny_detector"))
    return handler


def test_fewer_classes_than_topk_are_all_returned():
    handler = ImageClassifier()
    [answer] = handler.postprocess(torch.tensor([[1.0, 3.0]]))
    assert [*answer] == ["1", "0"]
    assert sum(answer.values()) == pytest.approx(1)


def test_topk_can_be_set_by_code_and_by_configuration(context):
    handler = ImageClassifier()
    handler.set_max_result_classes(2)
    assert handler.get_max_result_classes() == 2
    handler.initialize(context("tiny_classifier"))
    assert handler.topk == 2
    handler.initialize(context("tiny_classifier", topk=6))
    assert len(handler.postprocess(torch.arange(14.0).reshape(2, 7))[1]) == 6
    assert ImageClassifier.topk == 5
    with pytest.raises(HandlerError, match="topk"):
        handler.initialize(context("tiny_classifier", topk="all"))


def test_pixel_limit_is_lifted_only_by_the_server_setting(context, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    handler = ImageClassifier()
    handler.initialize(context("tiny_classifier"))
    with pytest.raises(BadRequest, match="limit_max_image_pixels"):
        handler.preprocess([{"body": jpeg()}])
    handler.initialize(context("tiny_classifier", limit=False))
    assert handler.preprocess([{"body": jpeg()}]).shape == (1, 3, 224, 224)


def test_handler_of_a_user_may_take_tensors_of_any_shape():
    class Vectors(VisionHandler):
        pass

    assert Vectors().preprocess([{"data": [1, 2]}, {"body": [3, 4]}]).tolist() == [[1, 2], [3, 4]]


def test_own_processing_is_used():
    class Red(ImageClassifier):
        image_processing = staticmethod(lambda image: torch.tensor(image.getpixel((0, 0))).float())

    assert Red().preprocess([{"body": encode(Image.new("RGB", (2, 2), "red"), "PNG")}]).tolist() == [[255, 0, 0]]


def test_own_processing_gets_the_image_with_its_channels():
    class Digits(ImageClassifier):
        image_processing = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])

    grey = encode(Image.new("L", (28, 28), 7), "PNG")
    assert Digits().preprocess([{"data": grey}]).shape == (1, 1, 28, 28)
    assert ImageClassifier().preprocess([{"data": grey}]).shape == (1, 3, 224, 224)
    assert ObjectDetector().preprocess([{"data": grey}]).shape == (1, 3, 28, 28)


def test_detector_stacks_images_of_one_size_and_lists_others(detector):
    same = detector.preprocess([{"body": jpeg(1)}, {"body": jpeg(2)}])
    assert same.shape == (2, 3, 280, 320)
    mixed = detector.preprocess([{"body": jpeg(1)}, {"body": jpeg(2, 30, 40)}])
    assert [tuple(image.shape) for image in mixed] == [(3, 280, 320), (3, 40, 30)]
    assert len(detector.postprocess(detector.inference(mixed))) == 2


@pytest.mark.parametrize("sizes", [[(30, 40)] * 2, [(30, 40), (40, 30)]])
def test_images_have_the_dtype_of_the_model(context, sizes):
    handler = ObjectDetector()
    handler.initialize(context("tiny_detector", dtype="bfloat16"))
    seen = []
    handler.model.register_forward_pre_hook(lambda module, inputs: seen.extend(image.dtype for image in inputs[0]))
    images = handler.preprocess([{"body": jpeg(1, *size)} for size in sizes])
    assert len(handler.postprocess(handler.inference(images))) == 2
    assert seen == [torch.bfloat16] * 2


def test_explanation_works_in_the_dtype_of_the_model(context):
    handler = ImageClassifier()
    handler.initialize(context("tiny_classifier"))
    handler.dtype = torch.float64  # any CPU can compute gradients in it
    handler.model.to(handler.dtype)
    assert torch.tensor(handler.get_insights(torch.rand(1, 3, 16, 16), None)).shape == (1, 3, 16, 16)


def test_scripted_detector_gets_a_list_and_its_losses_are_dropped(detector):
    class Scripted(torch.nn.Module):
        def forward(self, images: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
            found = [
                {"boxes": torch.zeros(1, 4), "labels": torch.ones(1, dtype=torch.int64), "scores": image.mean().view(1)}
                for image in images
            ]
            return {}, found

    with pytest.warns(DeprecationWarning, match="torch.jit"):
        detector.model = torch.jit.script(Scripted())
    assert takes_a_list(detector.model)
    output = detector.inference(torch.ones(2, 3, 4, 4))
    assert detector.postprocess(output) == [[{"1": [0, 0, 0, 0], "score": 1.0}]] * 2


def test_captum_is_imported_by_the_first_explanation(context, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "captum"]:
        monkeypatch.delitem(sys.modules, name)
    handler = ImageClassifier()
    handler.initialize(context("tiny_classifier"))
    assert "captum" not in sys.modules
    with torch.inference_mode():  # whatever mode the caller is in
        insights = handler.get_insights(torch.rand(1, 3, 16, 16), None, "1")
    assert torch.tensor(insights).shape == (1, 3, 16, 16)
    assert handler.ig is handler.ig


def test_missing_captum_is_reported_with_the_remedy(context, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    handler = ImageClassifier()
    handler.initialize(context("tiny_classifier"))
    with pytest.raises(Exception, match=r"pip install 'flambeau\[explain\]'"):
        handler.get_insights(torch.rand(1, 3, 16, 16), None)


@pytest.mark.parametrize("kind", [ImageSegmenter, ObjectDetector])
def test_maps_and_lists_have_no_explanations(kind):
    with pytest.raises(BadRequest, match="has no explanations"):
        kind().get_insights(torch.rand(1, 3, 4, 4), None)


@pytest.mark.parametrize("missing", ["torchvision", "PIL"])
def test_missing_package_is_reported_with_the_remedy(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "flambeau.handlers.vision_handlers")
    with pytest.raises(ImportError, match=r"pip install 'flambeau\[vision\]'"):
        importlib.import_module("flambeau.handlers.vision_handlers")


def test_picture_of_the_tests_is_not_uniform():
    low, high = picture(mode="L").getextrema()
    assert high - low > 100


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


def test_misspelled_option_is_rejected_with_the_right_one(context):
    with pytest.raises(HandlerError, match=r"has topK_, which ImageClassifier does not read; did you mean topk\?"):
        ImageClassifier().initialize(context("tiny_classifier", topK_=3))
