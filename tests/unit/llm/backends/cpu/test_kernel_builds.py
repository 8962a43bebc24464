"""Which library of CPU kernels a machine uses, and machines that cannot build it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flambeau.llm.backends.cpu import kernel_builds as builds

FEATURES = {each.name: " ".join(each.features) for each in builds.VARIANTS["x86_64"]}


@pytest.fixture
def prebuilt(tmp_path: Path, monkeypatch) -> Path:
    """A folder with files for all x86-64 variants, on a machine without a compiler; every file passes its check."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for name in FEATURES:
        (folder / f"{name}.so").write_text("library")
    (folder / builds.SOURCES_HASH).write_text(builds.sources_hash())
    monkeypatch.setattr(builds, "PREBUILT", folder)
    monkeypatch.setattr(builds.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(builds, "check", lambda library, kept: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    return folder


def on_processor(monkeypatch, features: str) -> None:
    monkeypatch.setattr(builds, "processor_features", lambda: f"flags : sse2 {features}")


@pytest.mark.parametrize("name", FEATURES)
def test_the_fastest_prebuilt_library_that_the_processor_executes_is_used(name, prebuilt, tmp_path, monkeypatch):
    on_processor(monkeypatch, FEATURES[name])
    found = builds.find_kernels(tmp_path / "kept")
    assert (found.origin, found.path) == ("prebuilt", prebuilt / f"{name}.so")
    assert name in found.reason


def test_an_older_processor_has_no_prebuilt_library(prebuilt, tmp_path, monkeypatch):
    on_processor(monkeypatch, "")
    found = builds.find_kernels(tmp_path / "kept")
    assert (found.origin, found.path) == ("none", None)
    assert "g++" in found.reason


def test_libraries_of_other_sources_are_not_used(prebuilt, tmp_path, monkeypatch):
    on_processor(monkeypatch, FEATURES["x86-64-v4"])
    (prebuilt / builds.SOURCES_HASH).write_text("of an older version")
    assert builds.find_kernels(tmp_path / "kept").origin == "none"


def test_a_library_that_fails_its_check_gives_way_to_the_next(prebuilt, tmp_path, monkeypatch):
    on_processor(monkeypatch, FEATURES["x86-64-v4"])
    monkeypatch.setattr(builds, "check", lambda library, kept: "" if library.stem == "x86-64-v3" else "signal 4")
    assert builds.find_kernels(tmp_path / "kept").path == prebuilt / "x86-64-v3.so"
    monkeypatch.setattr(builds, "check", lambda library, kept: f"{library.name}: signal 4")
    assert "x86-64-v3.so: signal 4" in builds.find_kernels(tmp_path / "kept").reason


def test_a_library_that_was_built_before_needs_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    kept = tmp_path / f"operators-{builds.cache_key(builds.FLAGS)}.so"
    kept.write_text("library")
    found = builds.find_kernels(tmp_path)
    assert (found.origin, found.path) == ("kept", kept)


def test_a_library_is_tried_in_another_process_until_it_passed(tmp_path, monkeypatch):
    library = tmp_path / "x.so"
    library.write_text("no library")
    assert "x.so does not work on this processor" in builds.check(library, tmp_path / "kept")
    monkeypatch.setattr(builds, "CHECK", "import os; os.kill(os.getpid(), 4)")
    assert "signal 4" in builds.check(library, tmp_path / "kept")
    monkeypatch.setattr(builds, "CHECK", "")
    assert builds.check(library, tmp_path / "kept") == ""
    monkeypatch.setattr(builds, "CHECK", "raise SystemExit(1)")
    assert builds.check(library, tmp_path / "kept") == ""  # as it passed before


def compiler_that(tmp_path: Path, script: str) -> str:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path):
    compiler = compiler_that(tmp_path, "echo 'x.h:1: error: no such thing' >&2; exit 1")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        builds.built_library(tmp_path / "kept", compiler)
    assert builds.first_error_line(failed.value) == "x.h:1: error: no such thing"
    assert not list((tmp_path / "kept").glob("*.so"))


def test_two_that_build_at_once_build_once_and_say_how_far_they_are(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    log = tmp_path / "log"
    script = f'for last; do :; done; case "$*" in *-shared*) echo linked >> {log};; esac; echo library > $last'
    compiler = compiler_that(tmp_path, script)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(builds.built_library(tmp_path / "kept", compiler)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "linked\n"
    assert {path.read_text() for path in found} == {"library\n"}
    assert len(found) == 4
    count = len([*builds.SOURCES.glob("*.cpp")])
    lines = [record.getMessage() for record in caplog.records]
    assert lines[1 : 1 + count] == [f"CPU kernels: {i} of {count} files compiled" for i in range(1, count + 1)]


def test_a_process_that_ends_does_not_wait_for_its_compilers(tmp_path: Path):
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nsleep 300\n")
    compiler.chmod(0o755)
    code = f"""
import threading, time
from pathlib import Path
from flambeau.llm.backends.cpu import kernel_builds
arguments = Path({str(tmp_path)!r}), {str(compiler)!r}
threading.Thread(target=kernel_builds.built_library, args=arguments, daemon=True).start()
while not kernel_builds.running:
    time.sleep(0.01)
print(*[each._process.pid for each in kernel_builds.running])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for pid in map(int, ended.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_module_needs_no_torch():
    program = "import flambeau.llm.backends.cpu.kernel_builds, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheels_library_passes_its_own_test(tmp_path, monkeypatch):
    """The smallest variant only, not optimized: as a wheel has it, it takes half a minute to compile."""
    machine = builds.platform.machine()
    last = builds.VARIANTS[machine][-1]
    if not last.features <= set(builds.processor_features().split()):
        pytest.skip(f"this processor does not execute code for {last.name}")
    monkeypatch.setitem(builds.VARIANTS, machine, (last,))
    monkeypatch.setattr(builds, "COMMON_FLAGS", [flag.replace("-O3", "-O0") for flag in builds.COMMON_FLAGS])
    monkeypatch.setattr(builds, "PREBUILT", tmp_path / "prebuilt")
    builds.build_variants(tmp_path / "prebuilt", machine)
    found = builds.find_kernels(tmp_path / "kept")
    assert (found.origin, found.path) == ("prebuilt", tmp_path / "prebuilt" / f"{last.name}.so")
