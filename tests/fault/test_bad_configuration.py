"""A server with an invalid setting does not start: exit status 1 and one sentence, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.archives import pack_handler
from support.command import Command
from support.running import HANDLERS, path

PORTS = ["--port", "0", "--management-port", "0", "--metrics-port", "0"]
SERVE = [sys.executable, "-m", "flambeau.cli.main", "serve", *PORTS]


@pytest.fixture
def command(tmp_path):
    running = Command(tmp_path)
    yield running
    running.stop_all()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("inference_address=http://[::", "inference_address: 'http://[::' is not an address: Invalid IPv6 URL"),
        ("management_address=http://nothing.invalid", "could not be opened: "),
        ("metrics_config=bad.yaml", "bad.yaml is not YAML: a value does not fit its tag"),
        ("metrics_config=/dev/zero", "the metrics configuration /dev/zero cannot be read: it is not a regular file"),
        ("job_queue_size=1e3", "job_queue_size is '1e3'; it must be a whole number from 1 to 2147483647"),
        ("a=\\u12", "Malformed \\uxxxx encoding"),
        ("cors_allowed_origin=\\r\\nx: y", "cors_allowed_origin is '\\r\\nx: y'; it must be the value of a header"),
    ],
)
def test_invalid_property_stops_the_start(command, line, text):
    (command.folder / "bad.yaml").write_text("a: !!timestamp x")
    command.configure("disable_token_authorization=true", line)
    ended = command.run("--start", "--foreground", "--model-store", "store", "--ncs")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert text in output
    assert "Traceback" not in output
    assert "Unknown error" not in output


def test_invalid_variable_stops_the_start(command):
    command.configure("enable_envvars_config=true")
    env = {"TS_DEFAULT_WORKERS_PER_MODEL": "2000000000"}
    ended = command.run("--start", "--foreground", "--model-store", "store", "--ncs", env=env)
    assert ended.returncode == 1
    assert "default_workers_per_model is '2000000000'; it must be a whole number from 0 to 10000" in ended.stdout


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--host", ""], 1, "'' is not a host; write an IP address, or a name"),
        (["--host", "x" * 100], 1, "is not a host"),
        (["--workers", "2000000000"], 2, "--workers"),
        (["--batch-size", "1e3"], 2, "--batch-size"),
        (["--name", "n" * 5000, str(HANDLERS / "echo.py")], 1, "names and versions may have 256 characters"),
    ],
)
def test_invalid_flag_stops_the_start(tmp_path, words, status, text):
    environment = {**os.environ, "PYTHONPATH": path()}
    ended = subprocess.run([*SERVE, *words], capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment)
    assert ended.returncode == status, ended.stderr
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["/dev/zero"], "/dev/zero is neither a file nor a folder, but a device or a pipe"),
        (["pipe.py"], "pipe.py is neither a file nor a folder, but a device or a pipe"),
        (["model"], "model/config.json cannot be read: it is not a regular file"),
        (["--config", "/dev/zero"], "/dev/zero cannot be read: it is not a regular file"),
        (["--config", "long.yaml"], "long.yaml cannot be read: it is longer than 1 MiB"),
        (["--certificate-file", "/dev/zero", "--private-key-file", "long.yaml"], "/dev/zero cannot be read: it is not"),
    ],
)
def test_file_without_an_end_stops_the_start(tmp_path, words, text):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "long.yaml").write_text("#" * (1 << 20) + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to("/dev/zero")
    environment = {**os.environ, "PYTHONPATH": path()}
    ended = subprocess.run([*SERVE, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert ended.returncode == 1, ended.stderr
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_invalid_model_config_is_named_when_a_model_is_registered(start, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    contents = {
        "dated": ("a: !!timestamp x", 400),
        "crowd": ("minWorkers: 2000000000\nmaxWorkers: 2000000000", 200),
        "ranks": ("parallelType: tp\nparallelLevel: 2000000000", 200),
    }
    for name, (config, _) in contents.items():
        pack_handler(store, "echo", name=name, config=config)
    server = start("--model-store", store).wait_ready()
    for name, (_, status) in contents.items():
        reply = server.manage("POST", f"/models?url={name}.mar")
        assert reply.status == status, reply.body
    assert server.manage("POST", "/models?url=dated.mar").message == (
        "model-config.yaml is not valid YAML: a value is not a valid timestamp (line 1, column 4) in `a: !!timestamp x`"
    )
    assert "Traceback" not in server.log
