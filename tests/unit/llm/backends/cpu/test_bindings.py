"""The library of CPU kernels, and machines that cannot build it."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from flambeau.llm.backends.cpu import bindings
from flambeau.llm.backends.cpu import bindings as build
from support.log_records import logged


def test_without_a_compiler_one_warning_names_the_remedy(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    kernels = bindings.KernelLibrary()
    assert not kernels.load()
    assert not kernels.load()
    [(reason,)] = logged(caplog, "flambeau.llm.backends.cpu.bindings")
    assert "g++" in reason


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.h:1: error: no such thing' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build.built_library(tmp_path / "kept", str(compiler))
    assert build.first_error_line(failed.value) == "x.h:1: error: no such thing"
    assert not list((tmp_path / "kept").glob("*.so"))


def test_two_that_build_at_once_build_once(tmp_path: Path):
    compiler, log = tmp_path / "cc", tmp_path / "log"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\n"
        f"echo built >> {log}\nwhile [ $1 != -o ]; do shift; done\necho library > $2\n"
    )
    compiler.chmod(0o755)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.built_library(tmp_path / "kept", str(compiler))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "built\n"
    assert {path.read_text() for path in found} == {"library\n"}
    assert len(found) == 4
