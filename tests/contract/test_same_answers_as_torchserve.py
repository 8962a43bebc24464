"""The same archives on TorchServe and on this server give the same answers.

Needs an environment with torchserve, torchvision, captum and Java, named by FLAMBEAU_TORCHSERVE_VENV.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from flambeau.archive.pack import Recipe, pack
from support.packing import pack_network
from support.pictures import encode, jpeg, picture
from support.running import HANDLERS
from support.torchserve import CommandServer, our_environment, torchserve_environment

VENV = os.environ.get("FLAMBEAU_TORCHSERVE_VENV")

pytestmark = [
    pytest.mark.skipif(not VENV, reason="FLAMBEAU_TORCHSERVE_VENV does not name an environment with TorchServe"),
    pytest.mark.timeout(240),
]

WORDS = [
    "it",
    "is",
    "a",
    "great",
    "day",
    "we",
    "will",
    "not",
    "win",
    "cafe",
    "you",
    "cannot",
    "stop",
    "of",
    "the",
    "clock",
    "madam",
    "he",
    "would",
]
PAIRS = [f"{first} {second}" for first in WORDS for second in WORDS]
TEXTS = ["It's a <b>Great</b> day&nbsp;!", "We won't WIN... Café?", "You can't stop. He'd stop", "a day o'clock, ma'am"]


class ScriptedDetector(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = []
        for i in range(images.size(0)):
            scores = images[i].mean(dim=(1, 2)) * 1.3
            boxes = torch.stack([scores, scores * 2, scores * 3, scores * 4], dim=1) * 10
            found.append({"boxes": boxes, "labels": torch.tensor([2, 0, 1]), "scores": scores})
        return found


def pack_script(folder, name, handler, model, *extra):
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.script(model).save(folder / f"{name}.pt")
    recipe = Recipe(model_name=name, handler=handler, serialized_file=folder / f"{name}.pt", extra_files=[*extra])
    pack(recipe, folder)


def serve_both(folder, store, models, *lines):
    """TorchServe and this server with the same archives."""
    archives = folder / "archives"
    archives.mkdir()
    for model in models:
        (archives / f"{model}.mar").hardlink_to(store / f"{model}.mar")
    venv = Path(VENV)
    common = ["default_workers_per_model=1", *lines]
    theirs = CommandServer(
        [str(venv / "bin" / "torchserve")], folder / "theirs", archives, common, torchserve_environment(venv)
    )
    ours = CommandServer(
        [sys.executable, "-m", "flambeau.torchserve.command"], folder / "ours", archives, common, our_environment()
    )
    return theirs, ours


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    labels, vocabulary = folder / "index_to_name.json", folder / "source_vocab.pt"
    labels.write_text(json.dumps({str(i): ["n01", f"label {i}"] for i in range(10)}))
    torch.save({word: i % 64 for i, word in enumerate([*WORDS, *PAIRS])}, vocabulary)
    pack_network(folder, "classifier", "image_classifier", "tiny_classifier", extra_files=[labels])
    pack_network(folder, "unlabelled", "image_classifier", "tiny_classifier")
    pack_network(folder, "segmenter", "image_segmenter", "tiny_segmenter")
    pack_network(folder, "text", "text_classifier", "tiny_text", extra_files=[vocabulary, labels])
    pack_network(folder, "custom", str(HANDLERS / "custom_image_handler.py"), "resnet18", extra_files=[labels])
    pack_script(folder, "detector", "object_detector", ScriptedDetector(), labels)
    torch.manual_seed(0)
    pack_script(folder, "base", "base_handler", torch.nn.Linear(3, 2))
    return folder


@pytest.fixture(scope="module")
def both(store, tmp_path_factory):
    models = ["classifier", "unlabelled", "segmenter", "text", "custom", "detector"]
    servers = serve_both(tmp_path_factory.mktemp("both"), store, models)
    try:
        yield [server.wait_for_models(models, 120) for server in servers]
    finally:
        for server in servers:
            server.stop()


def near(value):
    """The same JSON, with room for the last digit of floats."""
    if isinstance(value, dict):
        return {key: near(item) for key, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, abs=1e-6) if isinstance(value, float) else value


def assert_same(servers, url, body, kind=None):
    headers = {"Content-Type": kind} if kind else {}
    theirs, ours = (server.request("POST", url, body, headers, timeout=60) for server in servers)
    assert theirs.status == 200, theirs.body
    assert ours.status == 200, ours.body
    assert ours.json == near(theirs.json)
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    if isinstance(theirs.json, dict):
        assert [*ours.json] == [*theirs.json]


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="data"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    + jpeg(4)
    + b"\r\n--x--\r\n"
)


@pytest.mark.parametrize("model", ["classifier", "unlabelled", "segmenter", "detector", "custom"])
@pytest.mark.parametrize(
    "data", [jpeg(1), jpeg(2, 500, 230), encode(picture(seed=3), "PNG")], ids=["jpeg", "wide", "png"]
)
def test_images(both, model, data):
    assert_same(both, f"/predictions/{model}", data)


@pytest.mark.parametrize("model", ["classifier", "segmenter", "detector"])
def test_images_in_other_clothes(both, model):
    assert_same(both, f"/predictions/{model}", FORM, "multipart/form-data; boundary=x")
    assert_same(both, f"/predictions/{model}", base64.b64encode(jpeg(5)), "text/plain")
    nested = json.dumps(torch.rand(3, 20, 30, generator=torch.Generator().manual_seed(1)).tolist()).encode()
    assert_same(both, f"/predictions/{model}", nested, "application/json")


@pytest.mark.parametrize("text", TEXTS)
def test_texts(both, text):
    assert_same(both, "/predictions/text", text.encode())
    assert_same(both, "/predictions/text", text.encode(), "text/plain")


def test_explanations_of_images(both):
    assert_same(both, "/explanations/classifier", jpeg(6))


ROWS = [[1, 2, 3.5], [4, 5, 6]]
TENSOR = {"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3.5]}
DOCUMENTS = {
    "json": [{"instances": ROWS}, {"instances": ROWS[:1]}],
    "kserve": [{"instances": ROWS}, {"instances": ROWS[:1]}],
    "kservev2": [
        {"id": "my-id", "inputs": [TENSOR]},
        {"id": "two", "inputs": [TENSOR, {**TENSOR, "name": "y", "data": [0, 0, 1]}]},
    ],
    "body": [ROWS[0]],
}
V2_HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class Tensors(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row["data"] for row in data], dtype=torch.float32)
"""


@pytest.mark.parametrize("envelope", DOCUMENTS)
def test_envelopes(store, tmp_path, envelope):
    if envelope == "kservev2":  # its rows are objects, which the base handler cannot stack
        (tmp_path / "tensors.py").write_text(V2_HANDLER)
        torch.manual_seed(0)
        pack_script(tmp_path, "base", str(tmp_path / "tensors.py"), torch.nn.Linear(3, 2))
        store = tmp_path
    servers = serve_both(tmp_path, store, ["base"], f"service_envelope={envelope}")
    try:
        for server in servers:
            server.wait_for_models(["base"], 60)
        for document in DOCUMENTS[envelope]:
            assert_same(servers, "/predictions/base", json.dumps(document).encode(), "application/json")
    finally:
        for server in servers:
            server.stop()
