"""Which edits of a handler leave alone what it has loaded."""

from __future__ import annotations

import pytest

from flambeau.handlers.base import BaseHandler
from flambeau.worker.setup_code import SETUP, first_change, inherited_names, setup_code

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


def test_what_the_template_calls_while_it_sets_up_is_known():
    class Mine(BaseHandler):
        pass

    names = inherited_names(Mine)
    assert "_load_pickled_model" in names
    assert not {"preprocess", "inference", "postprocess", "handle"} & names
