"""An archive of any format, made by TorchServe's archiver, answers here; one made here answers in TorchServe.

Needs an environment with torchserve, torch-model-archiver and Java, named by FLAMBEAU_TORCHSERVE_VENV.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from model_archiver import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from support.running import HANDLERS
from support.torchserve import CommandServer, our_environment, torchserve_environment

VENV = os.environ.get("FLAMBEAU_TORCHSERVE_VENV")

pytestmark = [
    pytest.mark.skipif(not VENV, reason="FLAMBEAU_TORCHSERVE_VENV does not name an environment with TorchServe"),
    pytest.mark.timeout(600),
]

FORMATS = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
MODELS = [(maker, kind) for maker in ("theirs", "ours") for kind in FORMATS]


PACK = "from model_archiver.model_packaging import generate_model_archive; generate_model_archive()"


def commands_of(maker: str) -> tuple[list[str], list[str], dict[str, str]]:
    """The archiver, the server and the environment of either."""
    if maker == "theirs":
        programs = Path(VENV) / "bin"
        return [f"{programs}/torch-model-archiver"], [f"{programs}/torchserve"], torchserve_environment(Path(VENV))
    return [sys.executable, "-c", PACK], [sys.executable, "-m", "flambeau.torchserve.command"], our_environment()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    (folder / "extra" / "deep").mkdir(parents=True)
    (folder / "extra" / "helper.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "extra" / "deep" / "offset.json").write_text(json.dumps(2))
    (folder / "config.yaml").write_text("minWorkers: 1\nmaxWorkers: 1\nhandler: {greeting: sum}\n")
    (folder / "adder.py").write_text((HANDLERS / "adder.py").read_text())
    for maker, kind in MODELS:
        archiver, _, environment = commands_of(maker)
        words = ["--model-name", f"{maker}-{kind}", "--version", "2.5", "--handler", "adder:answer"]
        words += ["--extra-files", "extra", "--config-file", "config.yaml", "--archive-format", kind]
        subprocess.run(
            [*archiver, *words, "--export-path", str(store)], cwd=folder, env={**os.environ, **environment}, check=True
        )
    return store


def test_the_original_packaging_runs_on_our_steps(tmp_path, monkeypatch):
    # TorchServe's own tests load this one file of theirs, which then imports the rest by its name: ours.
    [file] = Path(VENV).glob("lib/python*/site-packages/model_archiver/model_packaging.py")
    spec = importlib.util.spec_from_file_location("archiver", file)
    archiver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(archiver)
    (tmp_path / "handler.py").write_text("def handle(data, context): return data\n")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "labels").write_text("a")
    config = ModelArchiverConfig(
        "m", str(tmp_path / "handler.py"), "1.0", extra_files=str(tmp_path / "extra"), export_path=tmp_path / "out"
    )
    monkeypatch.setattr(archiver.ArgParser, "export_model_args_parser", lambda: config)
    archiver.generate_model_archive()
    with zipfile.ZipFile(tmp_path / "out" / "m.mar") as archive:
        assert set(archive.namelist()) == {"MAR-INF/MANIFEST.json", "handler.py", "labels"}
        assert archive.read("labels") == b"a"
    with pytest.raises(ModelArchiverError, match=r"m\.mar already exists\."):
        archiver.generate_model_archive()


@pytest.mark.parametrize("server", ["theirs", "ours"])
def test_archives_of_either_maker_answer_in_either_server(server, store, tmp_path):
    _, program, environment = commands_of(server)
    running = CommandServer(program, tmp_path / "server", store, ["enable_model_api=true"], environment)
    try:
        running.wait_for_models([f"{maker}-default" for maker in ("theirs", "ours")], timeout=150)
        for maker, kind in MODELS:
            name = f"{maker}-{kind}"
            if running.manage("GET", f"/models/{name}").status != 200:  # not every format is loaded by itself
                url = f"{name}{FORMATS[kind]}"
                reply = running.manage("POST", f"/models?url={url}&initial_workers=1&synchronous=true")
                assert reply.status == 200, (name, reply.body)
            running.wait_for_models([name], timeout=150)
            [described] = running.manage("GET", f"/models/{name}").json
            assert (described["modelName"], described["modelVersion"]) == (name, "2.5")
            reply = running.predict(name, b"40")
            assert (reply.status, reply.body) == (200, b"sum 42"), name
    finally:
        running.stop()
