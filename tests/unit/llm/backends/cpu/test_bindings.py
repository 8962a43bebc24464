"""The library of CPU kernels in a process."""

from __future__ import annotations

from pathlib import Path

from flambeau.llm.backends.cpu import bindings, kernel_builds
from support.log_records import logged


def test_without_a_compiler_one_warning_names_the_remedy(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("FLAMBEAU_CACHE", str(tmp_path))
    kernels = bindings.KernelLibrary()
    assert not kernels.can_load()
    assert not kernels.load()
    assert not kernels.load()
    [(reason,)] = logged(caplog, "flambeau.llm.backends.cpu.bindings")
    assert "g++" in reason


def test_a_library_that_must_be_built_is_not_waited_for(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FLAMBEAU_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_builds, "find_compiler", lambda: "/usr/bin/c++")
    monkeypatch.setattr(kernel_builds, "build", lambda *_: (_ for _ in ()).throw(AssertionError("it was built")))
    kernels = bindings.KernelLibrary()
    assert kernels.can_load()
    assert not kernels.load(builds=False)
    kernels._lock.acquire()  # as long as another thread builds it
    assert not kernels.load(builds=False)
