"""The notebooks are executed from the first cell to the last, each in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.running import path
from support.snippets import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook: Path, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "notebook.py"), str(notebook), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": path(), "IPYTHONDIR": str(tmp_path / "ipython")}


def test_there_are_two_notebooks():
    assert [notebook.stem for notebook in NOTEBOOKS] == ["serve_a_model", "talk_to_a_language_model"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a busy machine is no failure
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs(notebook, tmp_path, environment):
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs before you commit a notebook"
    result = execute(notebook, tmp_path, environment)
    assert result.returncode == 0, result.stderr
    executed = json.loads((tmp_path / notebook.name).read_text())["cells"]
    assert all(cell["execution_count"] for cell in executed if cell["cell_type"] == "code")


@pytest.mark.timeout(600)
def test_notebook_with_a_failing_cell_is_reported(tmp_path, environment):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None, "source": "1 / 0"}
    broken = tmp_path / "broken.ipynb"
    broken.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    result = execute(broken, tmp_path, environment)
    assert (result.returncode, "ZeroDivisionError" in result.stderr) == (1, True)
