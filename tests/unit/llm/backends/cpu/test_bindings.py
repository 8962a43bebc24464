"""The library of CPU kernels, and machines that cannot build it."""

from __future__ import annotations

from pathlib import Path

from flambeau.llm.backends.cpu import bindings
from support.log_records import logged


def test_without_a_compiler_one_warning_names_the_remedy(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    kernels = bindings.KernelLibrary()
    assert not kernels.load()
    assert not kernels.load()
    [(reason,)] = logged(caplog, "flambeau.llm.backends.cpu.bindings")
    assert "g++" in reason
