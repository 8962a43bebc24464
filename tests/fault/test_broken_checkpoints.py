"""Checkpoints that cannot be loaded: told in one line, tried again only when asked, and loaded once they are mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flambeau.examples import storyteller
from support.load_archives import outcome_of
from support.running import RunningServer, lines_with, path

TARGET, DRAFT = storyteller.FOLDER / "target", storyteller.FOLDER / "draft"
CAUSES = {
    "cut": "model.safetensors is cut off or damaged",
    "wordless": "has none of tokenizer.json, tokenizer.model and tekken.json; put the model's own there",
    "foreign": "BertForMaskedLM is not a network that continues a text token by token",
    "misspelt": "has max_new_token, which gpt_handler does not know; did you mean max_new_tokens?",
    "misdrafted": "has 1000 tokens and the model 4096; a draft must have the vocabulary of the model",
    "empty": "is an empty folder; put the files of a checkpoint into it",
    "retokenized": "has 4096 tokens and the model 1000: it is the tokenizer of another model",
    "absent": "model_path is '/no/such/checkpoint', and there is no such file or folder",
}
SERVED = ("cut", "wordless", "misspelt")  # the others are loaded as a worker loads them, without a server


def spoil(kind: str, folder: Path) -> dict[str, object]:
    """Spoil a checkpoint; what is returned goes into the handler's section."""
    if kind == "cut":
        os.truncate(folder / "model.safetensors", 100_000)
    elif kind == "wordless":
        (folder / "tokenizer.model").unlink()
    elif kind == "foreign":
        edit(folder / "config.json", architectures=["BertForMaskedLM"])
    elif kind == "misspelt":
        return {"max_new_token": 8}
    elif kind == "misdrafted":
        shutil.copytree(DRAFT, folder / "draft")
        edit(folder / "draft" / "config.json", vocab_size=1000)
        return {"draft_model_path": str(folder / "draft"), "speculative": True}
    elif kind == "empty":
        (folder / "nothing").mkdir()
        return {"model_path": "nothing", "tokenizer_path": "tokenizer.model"}
    elif kind == "retokenized":
        edit(folder / "config.json", vocab_size=1000)
    elif kind == "absent":
        return {"model_path": "/no/such/checkpoint"}
    return {}


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_model(folder: Path, kind: str) -> Path:
    """A model folder with a spoilt copy of the checkpoint in it."""
    model = folder / kind
    shutil.copytree(TARGET, model)
    section = {"name": "gpt_handler", "num_blocks": 64, "compile": False, **spoil(kind, model)}
    settings = {"minWorkers": 1, "maxWorkers": 1, "handler": section}
    (model / "model-config.yaml").write_text(yaml.safe_dump(settings))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(folder):
    models = [str(write_model(folder, kind)) for kind in SERVED]
    server = RunningServer(folder / "log", *models, "--model-store", str(folder), env={"OMP_NUM_THREADS": "1"})
    yield server.wait_started()
    server.stop()


def errors_about(server: RunningServer, model: str) -> list[str]:
    return server.logged(f" {model} ", level="ERROR")


@pytest.mark.parametrize("kind", [kind for kind in CAUSES if kind not in SERVED])
def test_cause_is_one_line_and_final(tmp_path, kind):
    outcome = outcome_of(write_model(tmp_path, kind), [])
    assert outcome["is_final"]
    assert CAUSES[kind] in outcome["failure"]
    assert len(outcome["failure"].splitlines()) == 1


@pytest.mark.parametrize("kind", SERVED)
def test_cause_is_one_line_everywhere(server, kind):
    [worker] = server.describe(kind)["workers"]
    assert worker["state"] == "failed"
    assert CAUSES[kind] in worker["lastFailure"]["reason"]
    assert "lastLines" not in worker["lastFailure"]
    [unready] = [model for model in server.request("GET", "/readyz").json["models"] if model["modelName"] == kind]
    assert unready["status"] == "failed"
    assert [CAUSES[kind] in line for line in unready["lastFailure"]] == [True]
    reply = server.predict(kind, {"prompt": "Once upon a time"})
    assert reply.status == 503
    assert CAUSES[kind] in reply.message
    [line] = server.until(lambda: errors_about(server, kind))  # the log is written beside the answers
    assert CAUSES[kind] in line


def test_nothing_is_tried_again(server):
    assert server.request("GET", "/ping").status == 500
    assert "Traceback" not in server.log
    for kind in SERVED:
        assert len(errors_about(server, kind)) == 1
    assert [server.describe(kind)["workers"][0]["restarts"] for kind in SERVED] == [1] * len(SERVED)


def test_scaling_tries_again_and_finds_what_was_mended(server, folder):
    scale = "/models/wordless?min_worker=1&synchronous=true"
    reply = server.manage("PUT", scale)
    assert reply.status == 500
    assert CAUSES["wordless"] in reply.cause
    assert len(errors_about(server, "wordless")) == 2
    assert server.describe("wordless")["workers"][0]["state"] == "failed"
    shutil.copy(TARGET / "tokenizer.model", folder / "wordless")
    assert server.manage("PUT", scale).status == 200
    assert server.predict("wordless", {"prompt": "Once upon a time", "max_new_tokens": 2}).status == 200


def test_settings_that_were_mended_are_read_by_scaling(server, folder):
    file = folder / "misspelt" / "model-config.yaml"
    file.write_text(file.read_text().replace("max_new_token:", "max_new_tokens:"))
    assert server.manage("PUT", "/models/misspelt?min_worker=1&synchronous=true").status == 200


def test_registering_anew_tries_again(server, folder):
    register = "/models?url=cut&model_name=cut&initial_workers=1&synchronous=true"
    assert server.manage("DELETE", "/models/cut").status == 200
    reply = server.manage("POST", register)
    assert reply.status == 500
    assert CAUSES["cut"] in reply.cause
    shutil.copy(TARGET / "model.safetensors", folder / "cut")
    assert server.manage("POST", register).status == 200
    assert server.describe("cut")["workers"][0]["status"] == "READY"


def llm_serve(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    ports = [word for port in ("--port", "--management-port", "--metrics-port") for word in (port, "0")]
    return subprocess.run(
        [sys.executable, "-m", "flambeau.cli.main", "llm", "serve", *map(str, arguments), *ports],
        env={**os.environ, "PYTHONPATH": path(), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("kind", "level"), [("cut", "info"), ("retokenized", "debug")])
def test_llm_serve_says_why_in_its_last_line_and_ends(tmp_path, kind, level):
    shutil.copytree(TARGET, tmp_path / kind)
    spoil(kind, tmp_path / kind)
    result = llm_serve(tmp_path, tmp_path / kind, "--log-level", level)
    assert result.returncode == 1
    assert not result.stdout
    assert result.stderr.count(" ERROR ") == 1
    assert CAUSES[kind] in result.stderr.splitlines()[-1]
    assert ("Traceback" in result.stderr) is (level == "debug")
    left = {file.name for file in tmp_path.iterdir() if not file.name.startswith("torchinductor")}  # PyTorch's own
    assert left == {kind}  # it leaves nothing behind


UNSTEADY = """
from pathlib import Path
from flambeau.errors import HandlerError

class Unsteady:
    def initialize(self, context):
        was_here = Path(__file__).with_name("was_here")
        if was_here.exists():
            raise HandlerError("the weights are cut off")
        was_here.touch()
        raise RuntimeError("no memory is left")

    def handle(self, rows, context):
        return rows
"""
SERVE = """
import sys
from pathlib import Path
from flambeau.cli.serve import ModelOverrides, serve
from flambeau.config.server import Address, ServerConfig

config = ServerConfig(inference=Address(), management=Address(), metrics=Address())
overrides = ModelOverrides(must_load=True)
serve(config, [(Path(sys.argv[1]), overrides)], overrides, log_level="info")
"""


def test_model_that_must_load_ends_the_server_also_when_a_later_try_is_the_last(tmp_path):
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path / "unsteady.py")],
        env={**os.environ, "PYTHONPATH": path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert lines_with(result.stderr, "no memory is left", level="WARNING")
    assert lines_with(result.stderr, "the weights are cut off", level="ERROR")
