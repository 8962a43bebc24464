"""A machine that vanishes without a word: its packets are dropped in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import support
from support.running import HANDLERS, Load, RunningServer

HEARTBEAT_S = 3
CONFIG = "minWorkers: 2\nmaxWorkers: 2\ncluster: {here: 1}\n"
SUPPORT = Path(support.__file__).parent
WRAPPER = f'#!/bin/sh\nshift 2\nexec {sys.executable} {SUPPORT / "netns_server.py"} "$@"\n'


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def namespace():
    """A namespace at 10.213.N.2, which reaches this one at 10.213.N.1."""
    number = os.getpid() % 250
    name, ours, theirs = f"flambeau{number}", f"fla{number}", f"flb{number}"
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for a network namespace")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", f"10.213.{number}.1/24", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", f"10.213.{number}.2/24", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"10.213.{number}.1", theirs
    finally:
        ip("netns", "del", name)


def test_machine_that_vanishes_is_noticed_within_the_heartbeat(namespace, tmp_path):
    name, address, device = namespace
    wrapper = tmp_path / "python"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    model = tmp_path / "napper"
    model.mkdir()
    (model / "handler.py").write_text((HANDLERS / "napper.py").read_text())
    (model / "model-config.yaml").write_text(CONFIG)

    class Server(RunningServer):
        python = str(wrapper)

    server = Server(
        tmp_path / "server.log",
        *(str(model), "--cluster", "local=1", "--worker-address", f"{address}:0"),
        *("--worker-heartbeat", str(HEARTBEAT_S)),
        env={"FLAMBEAU_TEST_NETNS": name, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), *sys.path])},
    )
    try:
        server.wait_ready()
        with Load(lambda: server.predict("napper", {"sleep_s": 0.02}), 4) as load:
            ip("-n", name, "link", "set", device, "down")
            began = time.monotonic()
            server.until(lambda: server.failure("napper"))
            noticed_s = time.monotonic() - began
        print(f"\nnetwork cut, noticed: {noticed_s:.1f} s")
        assert noticed_s < HEARTBEAT_S + 3  # a busy machine may need a moment
        assert load.errors == []
        assert {reply.status for reply in load.replies} == {200}
        assert "was lost" in server.failure("napper")
    finally:
        server.stop(timeout=40)
