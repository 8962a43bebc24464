"""Changed files and the modules that came from them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flambeau.worker import changes
from flambeau.worker.changes import dependents, differing, forget, imported_by, modules_from, stamps


@pytest.fixture
def folder(tmp_path):
    for name in ("a.py", "deep/b.py", ".hidden/c.py", "__pycache__/d.py", "env/lib/e.py", "text.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    return tmp_path


def test_python_files_of_the_author_are_looked_at(folder):
    assert {file.name for file in stamps(folder, [folder / "text.txt", folder / "none"])} == {
        "a.py",
        "b.py",
        "text.txt",
    }


def test_changed_new_and_deleted_files_are_found(folder):
    before = stamps(folder)
    (folder / "a.py").write_text("x = 22\n")
    (folder / "new.py").touch()
    (folder / "deep" / "b.py").unlink()
    assert {file.name for file in differing(before, stamps(folder))} == {"a.py", "new.py", "b.py"}
    assert differing(before, before) == set()


def test_same_size_at_another_time_is_a_change(folder):
    before = stamps(folder)
    os.utime(folder / "a.py", ns=(1, 1))
    assert differing(before, stamps(folder)) == {folder / "a.py"}


def test_number_of_files_is_limited_and_the_nearest_come_first(folder, monkeypatch):
    monkeypatch.setattr(changes, "MAX_FILES", 1)
    assert [*stamps(folder)] == [folder / "a.py"]


def test_importers_of_a_changed_module_go_with_it():
    modules = {"handler": Path("handler.py"), "net": Path("net.py"), "layers": Path("layers.py"), "o": Path("o.py")}
    sources = {
        Path("handler.py"): "from net import Net",
        Path("net.py"): "def f():\n    import layers",
        Path("o.py"): "import json",
    }
    assert dependents(modules, sources, {Path("layers.py")}) == {"layers", "net", "handler"}
    assert dependents(modules, sources, {Path("handler.py")}) == {"handler"}


def test_imports_are_read_from_source():
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\n"
    assert imported_by(source) == {"a", "a.b", "c", "c.d", "e", "f", "f.g"}
    assert imported_by("not python") == set()


def test_forgotten_module_is_imported_anew_even_within_a_second(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "forgotten_module.py"
    file.write_text("x = 1\n")
    os.utime(file, (1000, 1000))
    import forgotten_module

    assert forgotten_module.x == 1
    assert modules_from(tmp_path) == {"forgotten_module": file}
    file.write_text("x = 2\n")
    os.utime(file, (1000, 1000))  # the same second and size: bytecode would not tell
    forget(["forgotten_module"], [file])
    import forgotten_module

    assert forgotten_module.x == 2
    del sys.modules["forgotten_module"]
