"""A server that was killed has the same models again, from the file of --state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from support.archives import pack_handler
from support.running import RunningServer, path

CALLED = "x-flambeau-model-version"


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    for version in ("1.0", "2.0", "3.0"):
        pack_handler(folder, "echo", name="m", version=version, file=f"m-{version}.mar")
    pack_handler(folder, "echo", name="other")
    pack_handler(folder, "echo", name="gone")
    return folder


def start(tmp_path, store, number, *models):
    flags = ("--model-store", str(store), "--state", str(tmp_path / "state.json"))
    return RunningServer(tmp_path / f"log-{number}", *map(str, models), *flags)


def settings_of(server, version):
    described = server.describe(f"m/{version}")
    return [described[key] for key in ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")]


def test_killed_server_has_its_models_again(tmp_path, store):
    server = start(tmp_path, store, 1).wait_ready()
    try:
        for call in (
            ("POST", "/models?url=m-1.0.mar&initial_workers=1&batch_size=4&max_batch_delay=20"),
            ("POST", "/models?url=m-2.0.mar&initial_workers=1"),
            ("POST", "/models?url=m-3.0.mar&initial_workers=1"),
            ("POST", "/models?url=other.mar&initial_workers=0"),
            ("POST", "/models?url=gone.mar&initial_workers=0"),
            ("PUT", "/models/m/1.0?min_worker=2&max_worker=3&synchronous=true"),
            ("PUT", "/models/m/2.0/set-default"),
            ("PUT", "/models/m/3.0/traffic?percent=50"),
            ("DELETE", "/models/gone"),
        ):
            reply = server.manage(*call)
            assert reply.status == 200, reply.text
    finally:
        server.stop(signal.SIGKILL)
    server = start(tmp_path, store, 2).wait_ready()
    try:
        assert settings_of(server, "1.0") == [2, 3, 4, 20]
        assert settings_of(server, "2.0") == [1, 1, 1, 0]
        assert server.predict("m/1.0", b"x").status == 200
        assert {server.predict("m", b"x").headers[CALLED] for _ in range(10)} == {"2.0", "3.0"}
        assert server.describe("other")["minWorkers"] == 0
        assert server.manage("GET", "/models/gone").status == 404
        refused = second_server(tmp_path, store)
        assert refused.returncode == 1
        assert "state.json" in refused.stderr
    finally:
        server.stop()


def second_server(tmp_path, store):
    words = ["--model-store", str(store), "--port", "0", "--management-port", "0", "--metrics-port", "0"]
    command = [sys.executable, "-m", "flambeau.cli.main", "serve", *words]
    variables = {**os.environ, "PYTHONPATH": path(), "FLAMBEAU_STATE": str(tmp_path / "state.json")}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def test_models_that_are_gone_or_named_at_the_start(tmp_path, store):
    server = start(tmp_path, store, 1).wait_ready()
    try:
        for name in ("other", "gone"):
            reply = server.manage("POST", f"/models?url={name}.mar&initial_workers=1&batch_size=7")
            assert reply.status == 200, reply.text
    finally:
        server.stop(signal.SIGKILL)
    (store / "gone.mar").unlink()
    server = start(tmp_path, store, 2, store / "other.mar")
    try:
        server.wait_started()
        ready = server.request("GET", "/readyz")
        assert ready.status == 503
        assert [(one["modelName"], one["status"]) for one in ready.json["models"]] == [("gone 1.0", "missing")]
        assert server.logged("gone 1.0", "gone.mar", level="ERROR")
        assert server.logged("other 1.0", "state.json", level="INFO")
        assert server.describe("other")["batchSize"] == 1
        document = json.loads((tmp_path / "state.json").read_text())
        assert [model["name"] for model in document["models"]] == ["gone", "other"]
        assert server.manage("DELETE", "/models/gone").status == 200
        assert server.request("GET", "/readyz").status == 200
        assert server.manage("DELETE", "/models/other").status == 200
        assert json.loads((tmp_path / "state.json").read_text())["models"] == []
    finally:
        server.stop()
