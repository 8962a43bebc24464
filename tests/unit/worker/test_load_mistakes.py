"""The sentences about mistakes that the load of a model reveals, without a server."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from flambeau.file_import import import_file
from flambeau.worker.handler_mistakes import explain_exception
from flambeau.worker.load_mistakes import explain_hooks, explain_missing_method, explain_shadowing
from flambeau.worker.result_mistakes import explain_oddity


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Import files of a model; returns the module of its handler."""
    monkeypatch.syspath_prepend(tmp_path)

    def load_files(source, **files):
        for name, text in {"mine_to_load": source, **files}.items():
            (tmp_path / f"{name}.py").write_text(text)
        return import_file(tmp_path / "mine_to_load.py")

    yield load_files
    for name in ("mine_to_load", "helper_to_load"):
        sys.modules.pop(name, None)


def explained(load, source, **files):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        load(source, **files)
    return explain_exception(raised.value)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def handle(:\n", "SyntaxError: invalid syntax (mine_to_load.py:1, column 12), in `def handle(:`. Correct"),
        ("def f():\n    x\n\ty\n", "TabError: inconsistent use of tabs and spaces in indentation (mine_to_load.py:3"),
        ("from .helper import x\n", "(mine_to_load.py:1): the files of a model are modules of their own"),
        (
            "from helper_to_load import cleen\n",
            "has no 'cleen' (mine_to_load.py:1); it defines clean. Did you mean",
        ),
        ("import nobody_has_this\n", "If it is a file of yours, put it beside the handler"),
        (
            "from os import nothing_like_that\n",
            "os has no 'nothing_like_that' (mine_to_load.py:1). Correct the name, or use",
        ),
        ("from ts.torch_handler import BaseHandler\n", "Write `from ts.torch_handler.base_handler import BaseHandler`"),
        (
            "from json import lodas\n",
            "json has no 'lodas' (mine_to_load.py:1). Did you mean loads?",
        ),
        ("1 / 0\n", ""),  # nothing to add to the exception
    ],
)
def test_code_that_cannot_be_imported(load, source, sentence):
    found = explained(load, source, helper_to_load="def clean(): ...\n")
    assert sentence in found
    assert bool(sentence) == bool(found)


def test_files_that_import_each_other(load):
    found = explained(load, "from helper_to_load import a\n", helper_to_load="from mine_to_load import b\na = 1\n")
    assert "mine_to_load.py has no 'b' (helper_to_load.py:1), because the two files import each other" in found


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("pre_process", "preprocess"),
        ("postProcess", "postprocess"),
        ("initialise", "initialize"),
        ("handel", "handle"),
        ("inferrence", "inference"),
        ("get_insight", "get_insights"),
        ("load", None),
        ("preprocess_image", None),
        ("_preprocess", None),
        ("explain", None),
    ],
)
def test_misspelt_hook(load, name, hook):
    handler = load(f"class Mine:\n    def {name}(self, data): ...\n").Mine
    found = [*explain_hooks(handler)]
    if hook is None:
        assert found == []
    else:
        assert found == [
            f"Mine.{name} (mine_to_load.py:2) is never called: the server knows {hook}. "
            f"Rename it to {hook}, if that is meant"
        ]


def test_method_that_the_author_calls_is_not_misspelt(load):
    source = (
        "class Mine:\n    def handle(self, data, c): return self.pre_process(data)\n    def pre_process(self, d): ...\n"
    )
    assert [*explain_hooks(load(source).Mine)] == []


def test_hook_beside_a_similar_name_is_not_misspelt(load):
    source = "class Mine:\n    def preprocess(self, data): ...\n    def preprocess2(self, data): ...\n"
    assert [*explain_hooks(load(source).Mine)] == []


def test_class_without_handle(load):
    handler = load("class Mine:\n    def predict(self, data): ...\n").Mine
    assert explain_missing_method(handler, "handle") == (
        "Mine in mine_to_load.py has predict. Define handle(self, data, context), or build on BaseHandler, which has it"
    )


def test_file_named_like_a_module_of_the_standard_library(tmp_path):
    for name in ("handler.py", "queue.py", "notes.txt"):
        (tmp_path / name).write_text("")
    [sentence] = explain_shadowing(tmp_path)
    assert sentence.startswith("queue.py in the model's folder")


def test_file_named_like_an_installed_package(tmp_path):
    for name in ("handler.py", "msgspec.py"):
        (tmp_path / name).write_text("")
    [sentence] = explain_shadowing(tmp_path)
    assert sentence.startswith("msgspec.py in the model's folder has the name of an installed package")


@pytest.mark.parametrize(("name", "is_hidden"), [("msgspec", True), ("queue", True), ("mine_to_load", False)])
def test_attribute_of_a_file_that_hides_a_package(tmp_path, name, is_hidden):
    module = ModuleType(name)
    module.__file__ = str(tmp_path / f"{name}.py")
    with pytest.raises(AttributeError) as raised:
        module.decode  # noqa: B018
    sentence = f"`{name}` is the model's own {name}.py here, and not the installed package. Rename the file"
    assert (sentence in explain_exception(raised.value)) is is_hidden


class Tokenizer:
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path):
        raise OSError(f"cannot load {pretrained_model_name_or_path}")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("here", "the folder that Tokenizer.from_pretrained reads has config.json. Write all of its files there"),
        ("nowhere", "Tokenizer.from_pretrained looks for a folder or a model of the hub called"),
    ],
)
def test_pretrained_files_that_are_missing(tmp_path, name, sentence):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    with pytest.raises(OSError, match="cannot load") as raised:
        Tokenizer.from_pretrained(tmp_path / name)
    assert sentence in explain_exception(raised.value)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "returned None for a request, which is sent as `null`"),
        ({"p": [0.5, float("nan")]}, "returned nan at result['p'][…], which JSON does not have"),
        (float("inf"), "returned inf at result, which"),
        ({"text": "NaN"}, ""),
        ([None], ""),
    ],
)
def test_values_that_are_hardly_meant(value, sentence):
    found = explain_oddity(value)
    assert sentence in found
    assert bool(sentence) == bool(found)
