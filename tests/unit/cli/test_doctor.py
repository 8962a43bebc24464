"""`flambeau doctor` imports what it calls installed, and has a line that mends each finding."""

from __future__ import annotations

import pytest

from flambeau.cli import doctor
from flambeau.llm.backends.cpu import kernel_builds


def test_package_that_is_there_and_cannot_be_imported_is_found(tmp_path, monkeypatch):
    (tmp_path / "fine_one.py").touch()
    (tmp_path / "broken_one.py").write_text("print('noise')\nraise RuntimeError('no such operator')\n")
    (tmp_path / "deadly_one.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.import_problems(["broken_one", "deadly_one", "fine_one", "json"])
    assert found == {"broken_one": "RuntimeError: no such operator", "deadly_one": "it ends the process"}


def test_machine_without_a_compiler_is_told_how_to_get_one(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    finding = doctor.compiler()
    assert (finding.level, finding.fix.startswith("apt-get install g++")) == ("note", True)


def test_machine_says_which_cpu_kernels_it_uses_and_why(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAMBEAU_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_builds, "PREBUILT", tmp_path)
    monkeypatch.setattr(kernel_builds, "find_compiler", lambda: "/usr/bin/g++")
    assert "/usr/bin/g++ by the first model" in doctor.cpu_kernels().text
    kept = tmp_path / "kernels" / f"operators-{kernel_builds.cache_key(kernel_builds.FLAGS)}.so"
    kept.parent.mkdir()
    kept.touch()
    assert doctor.cpu_kernels().text == f"compiled for this processor ({kept})"
    kept.unlink()
    monkeypatch.undo()
    monkeypatch.setenv("FLAMBEAU_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_builds, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    finding = doctor.cpu_kernels()
    assert (finding.level, "no C++ compiler was found" in finding.text) == ("note", True)


def test_gpus_have_memory_and_driver(monkeypatch):
    rows = [("0", "NVIDIA H200", "143771", "570.1")]
    monkeypatch.setattr(doctor, "gpu_properties", lambda: rows)
    assert [(one.what, one.text) for one in doctor.gpus()] == [("GPU 0", "NVIDIA H200, 140 GiB, driver 570.1")]


def test_missing_package_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"nobody_has_this": ("tests", "vision")})
    [finding] = doctor.packages()
    assert (finding.level, finding.fix) == ("note", "pip install 'flambeau[vision]'")


@pytest.mark.parametrize(("package", "line"), [("grpcio", "grpcio"), ("torchvision", "torch torchvision")])
def test_broken_package_is_installed_again(package, line):
    assert doctor.reinstall_line(package) == f"pip install --force-reinstall {line}"
