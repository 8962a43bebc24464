from __future__ import annotations

import json

import pytest

from flambeau.errors import NodeFailed
from flambeau.torchserve.workflows.execution import NodeInput, combine


def test_one_answer_is_the_body_of_the_next_node():
    assert NodeInput.from_answers({"before": b"abc"}) == NodeInput(b"abc", [("body", 3)])


def test_several_answers_keep_the_names_of_their_nodes():
    assert NodeInput.from_answers({"a": b"12", "b": b"", "c": b"3"}) == NodeInput(
        b"123", [("a", 2), ("b", 0), ("c", 1)]
    )


def test_single_leaf_answers_as_it_is():
    assert combine({"leaf": b"\xff not JSON"}) == b"\xff not JSON"


def test_several_leaves_are_one_object():
    assert json.loads(combine({"a": b'{"x": 1}', "b": b"{}"})) == {"a": {"x": 1}, "b": {}}


@pytest.mark.parametrize("content", [b"[1]", b"text", b"", b"[" * 100_000, b"\xff"])
def test_several_leaves_must_be_objects(content):
    with pytest.raises(NodeFailed, match=r"^Error executing b$"):
        combine({"a": b"{}", "b": content})
