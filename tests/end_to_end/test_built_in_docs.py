"""What docs/built-in-handlers.md shows works as written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flambeau.archive.pack import Recipe, pack
from support.packing import NETWORKS, new_network, pack_network
from support.pictures import jpeg
from support.running import HANDLERS, path

TEXT = (Path(__file__).parents[2] / "docs" / "built-in-handlers.md").read_text()


def snippets(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def shell(command, folder, port):
    command = command.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    program = f'flambeau() {{ "{sys.executable}" -m flambeau.cli.main "$@"; }}\n{command}'
    environment = {**os.environ, "PYTHONPATH": path()}
    words = ["bash", "-euo", "pipefail", "-c", program]
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model.py").write_text((NETWORKS / "tiny_classifier.py").read_text())
    torch.save(new_network("tiny_classifier").state_dict(), tmp_path / "weights.pth")
    (tmp_path / "index_to_name.json").write_text(json.dumps({str(i): f"flower {i}" for i in range(7)}))
    (tmp_path / "rose.jpg").write_bytes(jpeg(width=80, height=60))
    return tmp_path


def test_flowers_are_packed_served_asked_and_explained(start, files):
    packing, asking, explaining, enveloped = snippets("sh")
    pack_command, serve_command = packing.strip().rsplit("\n", 1)
    assert serve_command == "flambeau serve flowers.mar"
    shell(pack_command, files, 0)
    server = start(files / "flowers.mar").wait_ready()
    answer = json.loads(shell(asking, files, server.port))
    assert len(answer) == 5
    assert answer.keys() < {f"flower {i}" for i in range(7)}
    explanation = json.loads(shell(explaining, files, server.port))
    assert torch.tensor(explanation).shape == (3, 224, 224)
    (files / "model-config.yaml").write_text(snippets("yaml")[0])
    shell(f"{pack_command} --config-file model-config.yaml --force", files, 0)
    server = start(files / "flowers.mar").wait_ready()
    assert json.loads(shell(enveloped, files, server.port)) == {"predictions": [pytest.approx(answer)]}


def test_own_envelope_of_the_docs(start, tmp_path):
    envelope, _ = snippets("python")
    (tmp_path / "angle.py").write_text(envelope)
    (tmp_path / "model-config.yaml").write_text("envelope: angle\n")
    recipe = Recipe(
        model_name="m",
        handler=str(HANDLERS / "bare.py"),
        config_file=tmp_path / "model-config.yaml",
        extra_files=[tmp_path / "angle.py"],
    )
    server = start(pack(recipe, tmp_path)).wait_ready()
    assert server.predict("m", b"<hi>").body == b"<['str', 'hi']>"


def test_micro_batched_classifier_answers_as_the_plain_one(start, tmp_path):
    (tmp_path / "overlapped.py").write_text(snippets("python")[1])
    config = yaml.safe_load(snippets("yaml")[1])
    pack_network(tmp_path, "plain", "image_classifier", "tiny_classifier")
    pack_network(
        tmp_path,
        "overlapped",
        str(tmp_path / "overlapped.py"),
        "tiny_classifier",
        config={**config, "batchSize": 7, "maxBatchDelay": 20_000},
    )
    server = start(tmp_path / "plain.mar", tmp_path / "overlapped.mar").wait_ready()
    bodies = [*map(jpeg, range(6)), b"broken"]
    replies = [f.result() for f in server.at_once(lambda body: server.predict("overlapped", body), bodies)]
    assert replies.pop().status == 400
    for body, reply in zip(bodies, replies, strict=False):
        assert reply.json == pytest.approx(server.predict("plain", body).json, abs=1e-6)
