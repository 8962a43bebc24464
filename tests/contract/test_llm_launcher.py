"""`python -m ts.llm_launcher` starts a server on a model folder, waits, stops it and cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from support.archives import pack_handler
from support.language_models import ONE_THREAD, write_language_model
from support.running import RunningServer, free_ports, path


class Launched(RunningServer):
    """The server behind a launcher; signals reach the launcher only."""

    def __init__(self, folder, *words):
        self.port, self.management_port, self.metrics_port, *grpc = free_ports(5)
        addresses = zip(
            ("inference", "management", "metrics"), (self.port, self.management_port, self.metrics_port), strict=True
        )
        lines = [f"{name}_address=http://127.0.0.1:{port}\n" for name, port in addresses]
        lines += [f"grpc_{name}_port={port}\n" for name, port in zip(("inference", "management"), grpc, strict=True)]
        (folder / "config.properties").write_text("".join(lines))
        (folder / "tmp").mkdir()
        self.log_path = folder / "log"
        self._log = self.log_path.open("wb")
        settings = {
            "TS_CONFIG_FILE": "config.properties",
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": path(),
            **ONE_THREAD,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ts.llm_launcher", "--model_store", "store", "--disable_token_auth", *words],
            cwd=folder,
            env={**os.environ, **settings, "CUDA_VISIBLE_DEVICES": ""},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def launch(tmp_path):
    launched = []

    def start(*words):
        launched.append(Launched(tmp_path, *words))
        return launched[-1]

    yield start
    for server in launched:
        try:
            os.killpg(server.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        server.process.wait()
        server._log.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_folder_that_is_there_is_served_and_stays(launch, tmp_path, number):
    (tmp_path / "store").mkdir()
    pack_handler(tmp_path / "store", "echo", format="no-archive")
    server = launch("--model_name", "echo")
    server.until(lambda: server._connects() and server.predict("echo", b"hi").status == 200)
    server.process.send_signal(number)
    assert server.process.wait(60) == 0
    assert not server._connects()
    assert (tmp_path / "store" / "echo" / "echo.py").is_file()


def test_a_new_folder_is_made_served_and_removed(launch, tmp_path):
    server = launch("--model_id", "some/model")
    folder = tmp_path / "store" / "model"
    server.until(lambda: "hf download some/model" in server.log and server._connects())
    assert "model_path: some/model" in (folder / "model-config.yaml").read_text()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not folder.exists()


def test_a_checkpoint_folder_is_served(launch, tmp_path):
    write_language_model(tmp_path / "checkpoint")
    server = launch("--model_id", "checkpoint", "--vllm_engine.max_num_seqs", "8")
    prompt = {"prompt": "To be, or not", "max_new_tokens": 5, "temperature": 0}
    server.until(lambda: server._connects() and server.predict("model", prompt).status == 200, 50)
    text = server.predict("model", prompt).json["generated_text"]
    assert text.startswith("To be, or not")
    assert len(text) > len("To be, or not")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
