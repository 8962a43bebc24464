"""Machines that join a server by themselves, without a manager of the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from support.running import HANDLERS, RunningServer, is_running

SECRET = "a secret that both of them have, 123456"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RunningServer(
        tmp_path_factory.mktemp("join") / "server.log",
        *(str(HANDLERS / "napper.py"), "--cluster", "join", "--worker-address", "127.0.0.1:0"),
        env={"FLAMBEAU_CLUSTER_SECRET": SECRET},
    ).wait_listening()
    yield server
    assert server.stop(timeout=40) == 0


def cluster(server):
    return server.manage("GET", "/cluster").json


def join(server, secret=SECRET):
    address = cluster(server)["workerAddress"]
    variables = {**os.environ, "FLAMBEAU_CLUSTER_SECRET": secret}
    command = [sys.executable, "-m", "flambeau.cli.main", "cluster", "join", address]
    return subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def end(machine):
    machine.kill()
    machine.wait()
    machine.stderr.close()


def test_model_waits_for_a_machine_to_join_and_runs_there(server):
    server.until(lambda: cluster(server)["workers"])
    assert cluster(server)["workers"][0]["state"].startswith("waiting for a node with 1 CPU, ")
    machine = join(server)
    try:
        server.wait_ready()
        reply = server.predict("napper", {})
        [worker] = cluster(server)["workers"]
        assert reply.json["pid"] == worker["pids"][0]
        assert len(cluster(server)["nodes"]) == 1
        os.kill(worker["pids"][0], signal.SIGKILL)
        assert server.predict("napper", {}).status == 200
    finally:
        end(machine)
    # Its worker goes on; another machine of the same name takes it over, as a container that was restarted.
    pid = server.predict("napper", {}).json["pid"]
    machine = join(server)
    try:
        server.until(lambda: cluster(server)["nodes"] and cluster(server)["workers"][0]["agents"])
        assert server.predict("napper", {}).json["pid"] == pid
    finally:
        os.kill(pid, signal.SIGKILL)
        end(machine)


def test_machine_with_another_secret_is_refused(server):
    machine = join(server, "another secret, which is long enough too")
    try:
        assert b"cannot be joined" in machine.stderr.readline()
        assert is_running(machine.pid)  # it tries again
    finally:
        end(machine)
    assert server.logged("worker port", "token", level="WARNING")
    assert cluster(server)["nodes"] == []


def test_short_secret_is_refused():
    variables = {**os.environ, "FLAMBEAU_CLUSTER_SECRET": "short"}
    command = [sys.executable, "-m", "flambeau.cli.main", "cluster", "join", "127.0.0.1:1"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "openssl rand -hex 32" in done.stderr
