"""`flambeau doctor --torchserve CONFIG STORE`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.archives import pack_handler

DOCTOR = [sys.executable, "-m", "flambeau.cli.main", "doctor", "--torchserve"]


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    pack_handler(folder, "echo")
    return folder


def ask(config, store, *flags):
    return subprocess.run([*DOCTOR, config, store, *flags], capture_output=True, text=True, timeout=100)


def test_installation_that_will_work(store, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("load_models=echo.mar\ndisable_token_authorization=true\n")
    result = ask(config, store)
    assert result.returncode == 0, result.stdout
    assert "✓ echo.mar: will work" in result.stdout
    assert "1 model, 0 problems" in result.stdout


def test_what_will_not_work_is_told_and_the_exit_status_says_so(store, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("load_models=gone.mar\n")
    (store / "broken.mar").write_bytes(b"not an archive")
    result = ask(config, store, "--json")
    assert result.returncode == 1
    problems = {one["what"]: one["text"] for one in json.loads(result.stdout) if one["level"] == "problem"}
    assert "gone.mar" in problems["config.properties"]
    assert "neither a zip" in problems["broken.mar"]


def test_store_that_is_not_there_is_named(tmp_path):
    result = ask(tmp_path / "config.properties", tmp_path / "nowhere")
    assert result.returncode == 1
    assert "is not a folder" in result.stderr
