"""Prefixes on disk are there again after a worker was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import stat

import pytest
import yaml

from support.language_models import ONE_THREAD, write_language_model
from support.running import RunningServer

PROMPT = [*range(3, 103)]
NUM_STORED = 96  # in blocks of 16


@pytest.mark.slow
def test_a_prefix_survives_its_worker(tmp_path):
    handler = {
        "name": "gpt_handler",
        "model_path": str(write_language_model(tmp_path / "checkpoint")),
        "compile": False,
        "num_blocks": 64,
        "kv_disk_folder": str(tmp_path / "blocks"),
    }
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "model-config.yaml").write_text(yaml.dump({"minWorkers": 1, "maxWorkers": 1, "handler": handler}))
    server = RunningServer(tmp_path / "log", str(model), env=ONE_THREAD).wait_listening()
    try:
        server.until(lambda: server.is_ready, timeout=120)
        text, num_cached = complete(server)
        assert num_cached == 0
        server.until(lambda: len([*tmp_path.glob("blocks/*/*.kv")]) == NUM_STORED // 16, timeout=60)
        (pid,) = server.worker_pids("tiny")
        os.kill(pid, signal.SIGKILL)
        server.until(lambda: server.is_ready and server.worker_pids("tiny") not in ([], [pid]), timeout=120)
        assert complete(server) == (text, NUM_STORED)
        server.until(lambda: num_restored(server) == NUM_STORED // 16, timeout=60)
    finally:
        server.stop()
    for file in tmp_path.glob("blocks/*/*.kv"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def num_restored(server: RunningServer) -> float:
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    (found,) = re.findall(r"^flambeau_kv_blocks_restored_total\{.*\} (\S+)$", text, re.MULTILINE)
    return float(found)


def complete(server: RunningServer) -> tuple[str, int]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    found = server.request("POST", "/v1/completions", json.dumps(body).encode(), headers).json
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]
