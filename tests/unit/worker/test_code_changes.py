"""Changed files and the modules that came from them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flambeau.handlers.base import BaseHandler
from flambeau.worker import code_changes as changes
from flambeau.worker.code_changes import (
    SETUP,
    dependents,
    differing,
    first_change,
    forget,
    imported_by,
    inherited_names,
    modules_from,
    setup_code,
    stamps,
)


@pytest.fixture
def folder(tmp_path):
    for name in ("a.py", "deep/b.py", ".hidden/c.py", "__pycache__/d.py", "env/lib/e.py", "text.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    return tmp_path


def test_python_files_of_the_author_are_watched(folder):
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


def test_importers_of_a_changed_module_are_reloaded_too():
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


def test_forgotten_module_is_imported_again_even_within_a_second(tmp_path, monkeypatch):
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


HANDLER = '''
"""A handler."""
import json
import torch
from labels import LABELS

LIMIT = 5
SIZE = 3
FACTORS = {}
FACTORS["x"] = 2


def load(path):
    return Net(SIZE)


def shown(value):
    return round(value, LIMIT)


class Net:
    def __init__(self, size):
        self.size = size

    def forward(self, x):
        return x * self.size


class Handler(Base):
    top = 1
    scale = 2

    def initialize(self, context):
        self.net = load("weights")
        self.scaled = self.scale

    def preprocess(self, data):
        return [json.loads(row) for row in data]

    def postprocess(self, data):
        return [shown(x) for x in data][: self.top]
'''


def code(text, **others):
    sources = {"handler": text, **others}
    return setup_code(sources, ["Handler", "Base"], SETUP, ["model"])


def change(old, new, text=HANDLER):
    assert old in text
    return first_change(code(text), code(text.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("json.loads(row)", "row"),
        ("round(value, LIMIT)", "round(value)"),
        ("LIMIT = 5", "LIMIT = 6"),
        ("import json\n", "import json\nimport math\n"),
        ("top = 1", "top = 4"),
        ("self.net = load", "# a comment\n        self.net   =   load"),
        ('"""A handler."""', '"""The handler."""'),
        ("    def preprocess", "    def helper(self):\n        return 1\n\n    def preprocess"),
        ("class Handler(Base):", "class Unrelated:\n    pass\n\n\nclass Handler(Base):"),
    ],
)
def test_edits_that_setting_up_does_not_reach_change_nothing(old, new):
    assert change(old, new) is None


@pytest.mark.parametrize(
    ("old", "new", "label"),
    [
        ('load("weights")', 'load("other")', "initialize"),
        ("return Net(SIZE)", "return Net(1 + SIZE)", "load"),
        ("SIZE = 3", "SIZE = 4", "SIZE"),
        ("scale = 2", "scale = 3", "scale"),
        ("x * self.size", "x + self.size", "Net"),
        ("class Handler(Base)", "class Handler(Other)", "class Handler"),
        ('FACTORS["x"] = 2', 'FACTORS["x"] = 3', "top-level code"),
        ("    top = 1", "    def __init__(self):\n        pass\n\n    top = 1", "__init__"),
    ],
)
def test_edits_that_setting_up_reaches_are_named(old, new, label):
    assert change(old, new) == f"handler: {label}"


def test_second_assignment_counts_like_the_first():
    text = HANDLER.replace("SIZE = 3", "SIZE = 3\nSIZE = SIZE + 1")
    assert change("SIZE = 3\n", "SIZE = 4\n", text) == "handler: SIZE"


def test_neighbors_count_as_far_as_they_are_used():
    text = HANDLER.replace('load("weights")', "LABELS")
    old, new = "LABELS = [1]\nOTHER = 1\n", "LABELS = [1]\nOTHER = 2\n"
    assert first_change(code(text, labels=old), code(text, labels=new)) is None
    assert first_change(code(text, labels=old), code(text, labels="LABELS = [2]\n")) == "labels: LABELS"


def test_all_of_the_model_file_counts_and_what_it_uses():
    model = "from layers import Layer\n\n\nclass Model:\n    def forward(self, x):\n        return Layer(x)\n"
    layers = "class Layer:\n    pass\n\n\nclass Unused:\n    pass\n"
    before = code(HANDLER, model=model, layers=layers)
    assert first_change(before, code(HANDLER, model=model.replace("Layer(x)", "x"), layers=layers)) == "model: Model"
    assert first_change(before, code(HANDLER, model=model, layers=layers.replace("Layer:", "Layer(list):"))) == (
        "layers: Layer"
    )
    assert first_change(before, code(HANDLER, model=model, layers=layers.replace("Unused", "Other"))) is None


def test_methods_that_a_base_class_calls_during_setup_are_reached():
    class Mine(BaseHandler):
        pass

    names = inherited_names(Mine)
    assert "_load_pickled_model" in names
    assert not {"preprocess", "inference", "postprocess", "handle"} & names
