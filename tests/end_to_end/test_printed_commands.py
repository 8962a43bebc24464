"""The command that the server prints for a model works on that model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from support.models.net import Net
from support.onnx_models import save_affine, save_identity
from support.packing import pack_network
from support.pretrained_models import save_audio_classifier, save_vit
from support.running import RunningServer, free_ports

APIS = ("inference", "management", "metrics")
OWN_CLASS = """
class Own:
    example = {"text": "it's"}
    def initialize(self, context):
        pass
    def handle(self, data, context):
        return [row["body"]["text"].upper() for row in data]
"""
OWN_FUNCTION = """
example = [1, 2]
def handle(data, context):
    return data and [sum(row["body"]) for row in data]
"""
WORD_COUNT = """
example = "to be or not to be"
def word_count(text):
    return {"words": len(text.split())}
"""
UNTOLD = """
def handle(body):
    return {"got": body}
"""
OWN_PICTURES = """
from flambeau.handlers.vision_handlers import ImageClassifier

class OwnPictures(ImageClassifier):
    pass
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "own_class.py").write_text(OWN_CLASS)
    (folder / "own_function.py").write_text(OWN_FUNCTION)
    (folder / "word_count.py").write_text(WORD_COUNT)
    (folder / "untold.py").write_text(UNTOLD)
    (folder / "own_pictures.py").write_text(OWN_PICTURES)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Net().eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "program.pt2")
    save_affine(folder / "affine.onnx")
    save_identity(folder / "large.onnx", 1, ["batch", 3, 64, 64])
    pack_network(folder, "pictures", "image_classifier", "tiny_classifier")
    pack_network(folder, "own", str(folder / "own_pictures.py"), "tiny_classifier")
    (folder / "own_pictures.py").unlink()
    save_vit(folder / "vit")
    save_audio_classifier(folder / "sounds")
    return folder


@pytest.fixture(scope="module")
def commands(models):
    """The printed command of each model, by the model's name."""
    files = sorted(path for path in models.iterdir() if path.suffix in ("", ".py", ".pt2", ".onnx", ".mar"))
    server = RunningServer(models / "log", *map(str, files)).wait_ready()
    lines = server.until(lambda: (found := server.logged("try: ")) and len(found) == len(files) and found)
    printed = [line.partition("try: ")[2] for line in lines]
    assert len(server.logged("no example of a request is known")) == len(server.logged("untold: no example")) == 1
    yield {command.partition("/predictions/")[2].split()[0]: command for command in printed}
    server.stop()


@pytest.mark.parametrize(
    ("model", "check"),
    [
        ("own_class", lambda text: text == "IT'S"),
        ("own_function", lambda text: text == "3"),
        ("program", lambda text: len(json.loads(text)) == 3),
        ("affine", lambda text: json.loads(text) == [1.5, 3.5]),
        ("large", lambda text: text.count("0.5") == 3 * 64 * 64),
        ("pictures", lambda text: sum(json.loads(text).values()) > 0.01),
        ("own", lambda text: sum(json.loads(text).values()) > 0.01),
        ("vit", lambda text: "score" in json.loads(text)[0]),
        ("sounds", lambda text: "score" in json.loads(text)[0]),
        ("word_count", lambda text: json.loads(text) == {"words": 6}),
        ("untold", lambda text: json.loads(text) == {"got": {}}),
    ],
)
def test_printed_command_works(commands, tmp_path, model, check):
    command = commands[model].replace("curl ", "curl -sS --fail-with-body ")
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert check(result.stdout.strip()), result.stdout[:300]


def test_printed_command_of_a_server_that_makes_its_certificate_works(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FUNCTION)
    ports = free_ports(3)
    words = [f"--{name}-address=https://127.0.0.1:{port}" for name, port in zip(APIS, ports, strict=True)]
    command = [sys.executable, "-m", "flambeau", "serve", str(tmp_path / "own.py"), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        try:
            printed = next(line.partition("try: ")[2] for line in server.stderr if "try: " in line)
            result = subprocess.run(printed, shell=True, capture_output=True, text=True, timeout=100)
        finally:
            server.terminate()
    assert (result.returncode, result.stdout.strip()) == (0, "3"), result.stderr
