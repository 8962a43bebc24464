"""Broken files, hostile archives and taken ports: a clear error, promptly."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import zipfile

import pytest

from support.archives import pack_handler


def run(*arguments):
    command = [sys.executable, "-m", "flambeau.cli.main", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_missing_file_is_named(tmp_path):
    result = run(tmp_path / "nothing.mar")
    assert result.returncode == 1
    assert "nothing.mar does not exist" in result.stderr
    assert "Traceback" not in result.stderr


def test_file_of_another_kind_is_refused_with_the_kinds_that_work(tmp_path):
    (tmp_path / "model.zip").write_bytes(b"x")
    result = run(tmp_path / "model.zip")
    assert result.returncode == 1
    assert ".mar" in result.stderr


def test_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = pack_handler(tmp_path, "echo")
        result = run(model, "--port", port, "--management-port", 0, "--metrics-port", 0)
    assert result.returncode == 1
    assert f":{port} is in use by another process" in result.stderr
    assert f", pid {os.getpid()}); stop it, or choose another port with --port (inference_address)" in result.stderr
    assert "Traceback" not in result.stderr


def test_all_ports_in_use_are_named_at_once(tmp_path):
    with socket.socket() as taken, socket.socket() as other:
        for each in (taken, other):
            each.bind(("127.0.0.1", 0))
            each.listen()
        port, management = taken.getsockname()[1], other.getsockname()[1]
        model = pack_handler(tmp_path, "echo")
        result = run(model, "--port", port, "--management-port", management, "--metrics-port", 0)
    assert result.returncode == 1
    both = {f":{port} (--port) is in use, too", f":{management} (--management-port) is in use, too"}
    assert sum(text in result.stderr for text in both) == 1  # the other one begins the message


def hostile_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped.txt", "x")


def hostile_tar(path):
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("model/out")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
        content = b"x"
        entry = tarfile.TarInfo("model/out/passwd")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def pointing_out(path):
    pipe = path.parent / "pipe"
    os.mkfifo(pipe)
    manifest = {"model": {"modelName": "bad", "handler": "h.py", "configFile": str(pipe)}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))


def truncated(path):
    pack_handler(path.parent, "echo", file=path.name)
    path.write_bytes(path.read_bytes()[:-30])


def rubbish(path):
    path.write_bytes(b"this is no archive")


@pytest.mark.parametrize(
    ("make", "name", "told"),
    [
        (hostile_zip, "bad.mar", "../../escaped.txt"),
        (hostile_tar, "bad.tar.gz", "out"),
        (pointing_out, "bad.mar", "configFile"),
        (truncated, "bad.mar", "bad.mar"),
        (rubbish, "bad.mar", "neither a zip nor"),
    ],
)
def test_bad_archive_is_refused_at_start_and_at_registration(start, tmp_path, make, name, told):
    store = tmp_path / "store"
    store.mkdir()
    make(store / name)
    result = run(store / name, "--port", 0, "--management-port", 0, "--metrics-port", 0)
    assert result.returncode == 1
    assert told in result.stderr
    pack_handler(store, "echo")
    server = start(store).wait_started()  # the rest of the store is served
    assert server.predict("echo", {}).status == 200
    reply = server.manage("POST", f"/models?url={name}&initial_workers=1")
    assert (reply.status, reply.json["type"]) == (400, "InvalidModelException")
    assert told in reply.message + reply.cause
    assert not (tmp_path / "escaped.txt").exists()


def test_two_archives_of_one_file_name_are_both_served(start, tmp_path):
    paths = []
    for number in ("1", "2"):
        folder = tmp_path / number
        folder.mkdir()
        paths.append(pack_handler(folder, "echo", name=f"m{number}", file="same.mar"))
    server = start(*paths).wait_ready()
    assert [server.predict(name, {}).status for name in ("m1", "m2")] == [200, 200]


def test_bad_settings_file_is_named(tmp_path):
    model = pack_handler(tmp_path, "echo", config="minWorkers: [unclosed\n")
    result = run(model, "--port", 0, "--management-port", 0, "--metrics-port", 0)
    assert result.returncode == 1
    assert "model-config.yaml is not valid YAML" in result.stderr
