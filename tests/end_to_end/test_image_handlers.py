"""Image handlers on a real server answer as a plain PyTorch script does."""

from __future__ import annotations

import base64
import functools
import io
import json

import pytest
import torch
from PIL import Image

from support.language_models import ONE_THREAD
from support.packing import HANDLERS, pack_network
from support.pictures import claimed_png, encode, jpeg, picture
from support.running import RunningServer

BATCH = {"batchSize": 3, "maxBatchDelay": 600_000}  # only a full batch leaves before the client gives up
LABELS = {str(i): f"label {i}" for i in range(1000)}


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Archives in one folder, and the networks in them."""
    folder = tmp_path_factory.mktemp("store")
    labels = folder / "index_to_name.json"
    labels.write_text(json.dumps(LABELS))
    custom = str(HANDLERS / "custom_image_handler.py")
    return folder, {
        "classifier": pack_network(
            folder,
            "classifier",
            "image_classifier",
            "tiny_classifier",
            config={"handler": {"topk": 3}},
            extra_files=[labels],
        ),
        "batched": pack_network(folder, "batched", "image_classifier", "tiny_classifier", config=BATCH),
        "segmenter": pack_network(
            folder, "segmenter", "image_segmenter", "tiny_segmenter", config={**BATCH, "batchSize": 2}
        ),
        "detector": pack_network(
            folder,
            "detector",
            "object_detector",
            "tiny_detector",
            config={**BATCH, "handler": {"threshold": 0.3}},
            extra_files=[labels],
        ),
        "custom": pack_network(folder, "custom", custom, "resnet18", config=BATCH, extra_files=[labels]),
    }


@pytest.fixture(scope="module")
def server(networks):
    folder, models = networks
    archives = [str(folder / f"{name}.mar") for name in models]
    running = RunningServer(folder / "log", *archives, env=ONE_THREAD).wait_listening()
    running.until(lambda: running.request("GET", "/readyz").status == 200, timeout=60)
    yield running
    running.stop()


def processed(data):
    """An image as ImageNet models take it, by hand."""
    from torchvision.transforms import functional

    image = Image.open(io.BytesIO(data)).convert("RGB")
    tensor = functional.to_tensor(functional.center_crop(functional.resize(image, 256), 224))
    return functional.normalize(tensor, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@torch.inference_mode()
def classes(model, tensors, count, name=str):
    probabilities = torch.softmax(model(torch.stack(tensors)), dim=1)
    values, numbers = probabilities.topk(count)
    return [
        {name(number): pytest.approx(value, abs=1e-6) for number, value in zip(*row, strict=True)}
        for row in zip(numbers.tolist(), values.tolist(), strict=True)
    ]


def as_batch(server, model, bodies):
    """The replies to requests that can only have run as one batch."""
    replies = [future.result() for future in server.at_once(lambda body: server.predict(model, body), bodies)]
    return replies


def test_classifier_answers_with_the_most_probable_labels(server, networks):
    reply = server.predict("classifier", jpeg())
    [expected] = classes(networks[1]["classifier"], [processed(jpeg())], 3, lambda number: f"label {number}")
    assert reply.status == 200, reply.cause
    assert reply.json == expected
    assert [*reply.json] == [*expected]


def test_classifier_takes_base64_forms_and_nested_lists(server, networks):
    data = jpeg(7)
    expected = server.predict("classifier", data).json
    text = base64.b64encode(data)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="data"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
        + data
        + b"\r\n--x--\r\n"
    )
    assert server.predict("classifier", text, kind="text/plain").json == expected
    assert server.predict("classifier", text.decode()).json == expected  # a JSON string
    assert server.predict("classifier", form, kind="multipart/form-data; boundary=x").json == expected
    tensor = processed(data)[:, :40, :40]
    [expected] = classes(networks[1]["classifier"], [tensor], 3, lambda number: f"label {number}")
    assert server.predict("classifier", tensor.tolist()).json == expected


@pytest.mark.parametrize(
    ("mode", "format"), [("L", "PNG"), ("RGBA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("1", "PNG")]
)
def test_images_that_are_not_rgb_are_converted(server, networks, mode, format):
    data = encode(picture(seed=3, mode=mode), format)
    [expected] = classes(networks[1]["classifier"], [processed(data)], 3, lambda number: f"label {number}")
    reply = server.predict("classifier", data)
    assert reply.status == 200, reply.cause
    assert reply.json == expected


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b"", None, "empty"),
        (b"no image at all", None, "not an image"),
        (jpeg()[:2000], None, "cannot be decoded"),
        (claimed_png(20_000, 20_000), None, "limit_max_image_pixels"),
        (b"%%%=", "text/plain", "base64"),
        (b'"aGVsbG8="', "application/json", "not an image"),
        (b"[[1, 2], [3]]", "application/json", "not a tensor"),
        (b"[1, 2, 3]", "application/json", "3 dimensions"),
        (b"[[[]]]", "application/json", "no numbers"),
        (b"[[[1, NaN]]]", "application/json", "NaN"),
        (b"[[[1, Infinity]]]", "application/json", "Infinity"),
        (b"[[[1e99]]]", "application/json", "float32"),
        (b'[[["a"]]]', "application/json", "not a tensor"),
        (b'{"image": 1}', "application/json", "object"),
        (b"7", "application/json", "int"),
        (b"null", "application/json", "empty"),
        (b"image=1", "application/x-www-form-urlencoded", "'image'"),
    ],
)
def test_bad_images_are_refused_with_the_reason(server, body, kind, reason):
    reply = server.predict("classifier", body, kind=kind)
    assert reply.status == 400, reply.body
    assert reason in reply.message


def test_bad_image_fails_alone_in_its_batch(server, networks):
    good, bad, other = as_batch(server, "batched", [jpeg(1), jpeg(2)[:3000], jpeg(3)])
    expected = classes(networks[1]["batched"], [processed(jpeg(1)), processed(jpeg(3))], 5)
    assert (good.json, other.json) == tuple(expected)
    assert (bad.status, "cannot be decoded" in bad.message) == (400, True)


def test_batch_of_images_is_answered_in_order(server, networks):
    files = [jpeg(seed) for seed in (1, 2, 3)]
    replies = as_batch(server, "batched", files)
    assert [reply.json for reply in replies] == classes(networks[1]["batched"], [*map(processed, files)], 5)


def test_segmenter_returns_class_and_probability_of_each_pixel(server, networks):
    files = [jpeg(4), jpeg(5, 500, 300)]
    replies = as_batch(server, "segmenter", files)
    with torch.inference_mode():
        probabilities = networks[1]["segmenter"](torch.stack([*map(processed, files)]))["out"].softmax(dim=1)
    for reply, scores in zip(replies, probabilities, strict=True):
        answer = torch.tensor(reply.json)
        assert answer.shape == (224, 224, 2)
        assert torch.equal(answer[..., 0], scores.argmax(dim=0).float())
        torch.testing.assert_close(answer[..., 1], scores.amax(dim=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [[(60, 40)] * 3, [(60, 40), (50, 70), (60, 40)]])
def test_detector_returns_objects_above_the_threshold(server, networks, sizes):
    from torchvision.transforms.functional import to_tensor

    files = [jpeg(seed, *size) for seed, size in enumerate(sizes)]
    tensors = [to_tensor(Image.open(io.BytesIO(file))) for file in files]
    with torch.inference_mode():
        found = networks[1]["detector"](tensors)
    expected = [
        [
            {f"label {label}": box, "score": pytest.approx(score, abs=1e-6)}
            for box, label, score in zip(*(image[key].tolist() for key in ("boxes", "labels", "scores")), strict=True)
            if score >= 0.3
        ]
        for image in found
    ]
    assert [reply.json for reply in as_batch(server, "detector", files)] == expected
    assert {len(objects) for objects in expected} != {3}  # some are below the threshold


def test_explanation_is_captums_integrated_gradients(server, networks):
    from captum.attr import IntegratedGradients

    tensor = processed(jpeg(6))[:, :24, :24].contiguous()
    reply = server.request(
        "POST", "/explanations/classifier", json.dumps(tensor.tolist()).encode(), {"Content-Type": "application/json"}
    )
    assert reply.status == 200, reply.cause
    wanted = IntegratedGradients(networks[1]["classifier"]).attribute(tensor[None], target=0, n_steps=15)
    torch.testing.assert_close(torch.tensor(reply.json), wanted[0].float(), rtol=1e-4, atol=1e-6)


def explain(server, target):
    form = (
        b'--x\r\nContent-Disposition: form-data; name="data"; filename="a.jpg"\r\n\r\n'
        + jpeg(6)
        + f'\r\n--x\r\nContent-Disposition: form-data; name="target"\r\n\r\n{target}\r\n--x--\r\n'.encode()
    )
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    return server.request("POST", "/explanations/classifier", form, headers)


def test_explanation_is_of_the_class_that_is_asked_for(server, networks):
    from captum.attr import IntegratedGradients

    wanted = IntegratedGradients(networks[1]["classifier"]).attribute(processed(jpeg(6))[None], target=4, n_steps=15)
    torch.testing.assert_close(torch.tensor(explain(server, 4).json), wanted[0].float(), rtol=1e-4, atol=1e-6)


def test_explanations_that_cannot_be_are_refused(server):
    assert explain(server, 99).status == 400
    assert explain(server, "cat").message == "target must be a class index, not 'cat'"


def test_custom_handler_of_the_tutorial_answers_a_batch(server, networks):
    files = [jpeg(seed, 300 + 10 * seed, 260) for seed in (11, 12, 13)]
    replies = as_batch(server, "custom", files)
    expected = classes(networks[1]["custom"], [*map(processed, files)], 5, lambda number: f"label {number}")
    assert [reply.json for reply in replies] == expected
    assert expected[0] != expected[1]


def test_bad_images_for_the_handler_of_the_tutorial_are_refused_with_the_reason(server):
    bodies = [jpeg()[:2000], encode(picture(mode="L"), "PNG"), {"image": 1}]
    reasons = ["cannot be decoded", "other channels", "the body is a JSON object"]
    for reply, reason in zip(as_batch(server, "custom", bodies), reasons, strict=True):
        assert reply.status == 400, reply.body
        assert reason in reply.message


def test_handler_of_the_tutorial_says_what_an_explanation_needs(server):
    ask = functools.partial(server.request, "POST", "/explanations/custom")
    for future in server.at_once(ask, [jpeg()] * 3):
        assert future.result().status == 400
        assert "add get_insights(self, inputs, raw, target)" in future.result().message
