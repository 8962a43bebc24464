"""Snippets on archives and on code that imports `ts` run as written."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from support.packing import NETWORKS, new_network
from support.running import HANDLERS
from support.snippets import snippets


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").write_text((NETWORKS / "tiny_classifier.py").read_text())
    (tmp_path / "model" / "handler.py").write_text((HANDLERS / "echo.py").read_text())
    torch.save(new_network("tiny_classifier").state_dict(), tmp_path / "model" / "weights.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("net", "handler"):  # taken by what is loaded here, and given back
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return tmp_path


@pytest.mark.usefixtures("event_loop")
def test_handlers_are_initialized_and_models_loaded():
    handlers, loading = snippets("docs/torchserve-imports.md", "python")
    names: dict = {}
    exec(handlers, names)
    assert names["handler"].initialized
    exec(loading, names)
    assert names["service"].context.model_name == "digits"


def test_archives_are_packed_by_the_python_api(place):
    [packing] = snippets("docs/archives.md", "python")
    exec(packing, {})
    assert (place / "model_store" / "digits.mar").is_file()
