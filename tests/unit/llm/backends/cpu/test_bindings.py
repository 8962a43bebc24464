"""The library of CPU kernels, and machines that cannot build it."""

from __future__ import annotations

from pathlib import Path

from flambeau.llm.backends.cpu import bindings


def test_without_a_compiler_one_line_names_the_remedy(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    kernels = bindings.KernelLibrary()
    assert not kernels.load()
    assert not kernels.load()
    assert ["install g++" in record.getMessage() for record in caplog.records] == [True]
