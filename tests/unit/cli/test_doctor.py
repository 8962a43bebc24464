"""`flambeau doctor` imports what it calls installed, and has a line that mends each finding."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

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


@pytest.mark.parametrize(
    ("package", "installed", "line"),
    [
        ("grpcio", "2.13.0+cpu", "grpcio"),
        ("torchvision", "2.13.0", "torch torchvision"),
        ("torchvision", "2.13.0+cpu", "torch torchvision --extra-index-url https://download.pytorch.org/whl/cpu"),
    ],
)
def test_broken_package_is_installed_again(package, installed, line, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: installed)
    assert doctor.reinstall_line(package) == f"pip install --force-reinstall {line}"


@pytest.mark.parametrize(
    ("modules", "installed", "num_gpus", "has_index"),
    [
        (("torchvision",), "2.13.0+cpu", 0, True),
        (("torchvision",), "2.13.0", 1, False),
        (("torch", "torchvision"), "", 1, False),
        (("torch", "torchvision"), "", 0, True),
        (("onnxruntime",), "2.13.0+cpu", 0, False),
    ],
)
def test_packages_of_torch_are_installed_for_the_processor(modules, installed, num_gpus, has_index, monkeypatch):
    def version(_):
        if not installed:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr(doctor, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(doctor, "OPTIONAL", dict.fromkeys(modules, ("tests", "vision")))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    for finding in doctor.packages():
        assert finding.fix.count("https://download.pytorch.org/whl/cpu") == has_index


def test_findings_are_wrapped_between_words_on_a_terminal(monkeypatch, capsys):
    finding = doctor.Finding(
        "note", "package", "not installed; needed for models that are large", "pip install 'a long name of it'"
    )
    monkeypatch.setenv("COLUMNS", "30")
    doctor.report([finding], as_json=False)
    assert capsys.readouterr().out.startswith("· package: not installed; needed for models that are large\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    doctor.report([finding], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["· package: not installed;", "  needed for models that are"]
    assert lines[-1] == "    → pip install 'a long name of it'"
