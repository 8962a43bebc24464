"""`flambeau doctor --torchserve CONFIG STORE`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flambeau.archive.pack import Recipe, pack
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


def test_what_will_not_work_is_listed_and_sets_the_exit_status(store, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("load_models=gone.mar\n")
    (store / "broken.mar").write_bytes(b"not an archive")
    result = ask(config, store, "--json")
    assert result.returncode == 1
    problems = {one["what"]: one["text"] for one in json.loads(result.stdout) if one["level"] == "problem"}
    assert "gone.mar" in problems["config.properties"]
    assert "neither a zip" in problems["broken.mar"]


def test_pins_of_shared_packages_and_broken_imports_are_reported_beforehand(store, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("install_py_dep_per_model=true\ndisable_token_authorization=true\n")
    (tmp_path / "requirements.txt").write_text("torch<0.5\n")
    (tmp_path / "pinned.py").write_text("import broken_one\ndef handle(data, context):\n    return data\n")
    recipe = Recipe(
        model_name="pinned", handler=str(tmp_path / "pinned.py"), requirements_file=tmp_path / "requirements.txt"
    )
    pack(recipe, store)
    site = tmp_path / "site"
    site.mkdir()
    (site / "broken_one.py").write_text("raise OSError('libnone.so: no such file')\n")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    words = [*DOCTOR, config, store, "--json"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 1
    found = json.loads(result.stdout)
    problems = {one["what"]: one for one in found if one["level"] == "problem"}
    assert "wants torch<0.5" in problems["pinned.mar: requirements.txt"]["text"]
    assert problems["pinned.mar: requirements.txt"]["fix"].startswith("ignore_shared_pins=true")
    assert "libnone.so" in problems["broken_one"]["text"]
    assert problems["broken_one"]["fix"] == "pip install --force-reinstall broken_one"
    assert {"GPUs", "C++ compiler"} <= {one["what"] for one in found} or any("GPU" in one["what"] for one in found)


def test_store_that_is_not_there_is_named(tmp_path):
    result = ask(tmp_path / "config.properties", tmp_path / "nowhere")
    assert result.returncode == 1
    assert "is not a folder" in result.stderr
