"""A package that a built-in handler, the engine or an example needs and that is not installed is named at once."""

from __future__ import annotations

import subprocess

import pytest

from flambeau.examples import storyteller
from support.archives import pack_handler
from support.bare_python import python_without
from support.running import RunningServer, free_ports

HIDDEN = ("torch", "torchvision", "onnxruntime", "sklearn", "tokenizers", "sitecustomize")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter without the packages that handlers and engine need."""
    return str(python_without(tmp_path_factory.mktemp("bare"), HIDDEN))


@pytest.fixture
def weights(tmp_path):
    file = tmp_path / "network.pt"
    file.write_bytes(b"never read")
    return file


def run(python, tmp_path, *words):
    ports = [str(port) for port in free_ports(2)]
    command = [python, "-m", "flambeau.cli.main", *map(str, words)]
    command += ["--port", ports[0], "--management-port", ports[1], "--metrics-port", "0"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("serve", "WEIGHTS", "--handler", "image_classifier"), "needs torch, torchvision, which are not installed: "),
        (("serve", "WEIGHTS", "--handler", "onnx"), "pip install 'flambeau[onnx]'"),
        (("serve",), "pip install 'flambeau[example,llm]'"),
        (("llm", "serve", storyteller.FOLDER / "target"), "pip install 'flambeau[llm]'"),
    ],
    ids=["image", "onnx", "examples", "engine"],
)
def test_package_is_named_once_before_a_worker_starts_and_the_command_fails(python, tmp_path, weights, words, line):
    result = run(python, tmp_path, *(weights if word == "WEIGHTS" else word for word in words))
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("pip install") == 1
    assert line in result.stderr
    assert "Traceback" not in result.stderr
    assert "runs as process" not in result.stderr


def test_package_that_a_handler_of_your_own_imports_is_named_once_and_not_retried(python, tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\ndef handle(data, context):\n    return data\n")
    result = run(python, tmp_path, "serve", tmp_path / "mine.py")
    assert result.returncode == 1, result.stderr
    assert "No module named 'torch' (mine.py:1): it is not installed and not in the model's folder" in result.stderr
    assert result.stderr.count("pip install 'flambeau[torch]'") == 1
    assert result.stderr.count("runs as process") == 1


def test_other_models_are_served_and_readiness_has_the_line_to_install(python, tmp_path, weights, monkeypatch):
    monkeypatch.setattr(RunningServer, "python", python)
    echo = pack_handler(tmp_path, "echo")
    server = RunningServer(tmp_path / "log", str(echo), str(weights), env={"PYTHONPATH": ""})
    try:
        server.wait_started()
        assert server.predict("echo", {}).status == 200
        reply = server.request("GET", "/readyz")
        [model] = reply.json["models"]
        assert reply.status == 503
        assert model["status"] == "failed"
        assert "pip install 'flambeau[torch]'" in str(model["lastFailure"])
        assert server.log.count("pip install 'flambeau[torch]'") == 1
        scaled = server.manage("PUT", "/models/network?min_worker=2&synchronous=true")
        assert (scaled.status, "pip install" in scaled.cause) == (500, True)
    finally:
        server.stop()
