"""The `torchserve` command, as scripts use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from support.archives import pack_handler
from support.running import free_ports

MODULE = [sys.executable, "-m", "flambeau.cli.torchserve"]


@pytest.fixture
def place(tmp_path):
    """A store with one model, a config.properties, and a temporary folder of its own."""
    store = tmp_path / "store"
    store.mkdir()
    pack_handler(store, "echo")
    ports = free_ports(3)
    names = ("inference", "management", "metrics")
    lines = [f"{name}_address=http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)]
    (tmp_path / "config.properties").write_text("\n".join([*lines, "job_queue_size=1000", "vmargs=-Xmx1g", ""]))
    (tmp_path / "tmp").mkdir()
    return tmp_path, ports[0]


def torchserve(folder, *words):
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.run([*MODULE, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=30)


def wait_for(url, timeout=20):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return response.status
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{url} did not answer")


def test_start_in_the_background_and_stop(place):
    folder, port = place
    words = (
        "--start",
        "--ncs",
        "--model-store",
        "store",
        "--models",
        "parrot=echo.mar",
        "--ts-config",
        "config.properties",
    )
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    log = (folder / "log").open("wb")
    started = subprocess.run([*MODULE, *words], cwd=folder, env=environment, stdout=log, stderr=log, timeout=10)
    assert started.returncode == 0
    assert wait_for(f"http://127.0.0.1:{port}/predictions/parrot") == 200
    again = torchserve(folder, *words)
    assert (again.returncode, "already running" in again.stdout) == (1, True)
    assert torchserve(folder, "--stop", "--foreground").stdout == "TorchServe has stopped.\n"
    assert torchserve(folder, "--stop").stdout == "TorchServe is not currently running.\n"
    log.close()


def test_start_in_the_foreground(place):
    folder, port = place
    words = ["--start", "--foreground", "--ncs", "--model-store", "store", "--models", "all"]
    words += ["--disable-token-auth", "--enable-model-api"]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    process = subprocess.Popen([*MODULE, *words], cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    assert wait_for(f"http://127.0.0.1:{port}/predictions/echo") == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not (folder / "tmp" / ".model_server.pid").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model-store", "nowhere"], "--model-store directory not found: nowhere"),
        ([], "Missing mandatory parameter --model-store"),
        (["--ts-config", "none", "--model-store", "store"], "--ts-config file not found: none"),
        (["--log-config", "none", "--model-store", "store"], "--log-config file not found: none"),
    ],
)
def test_what_is_missing_is_said_in_torchserves_words(place, words, text):
    folder, _ = place
    result = torchserve(folder, "--start", *words)
    assert (result.returncode, result.stdout.strip()) == (1, text)


def test_version(place):
    assert torchserve(place[0], "--version").stdout.startswith("TorchServe Version is ")
