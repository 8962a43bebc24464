"""Loops that cannot end are known by their source, and no others are taken for one."""

from __future__ import annotations

import pytest

from flambeau.serving.workers.endless_loops import find_endless_loop


def in_function(body: str) -> str:
    return "def handle(data, limit):\n    i = 0\n" + "".join(f"    {line}\n" for line in body.splitlines())


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    pass",
        "while 1:\n    i += 1\n    if i > 3:\n        continue",
        "while i < limit:\n    j = i + 1",
        "while not data:\n    i = i * 2",
        "while True:\n    while i > 3:\n        i -= 1",
    ],
)
def test_loop_that_cannot_end(body):
    assert find_endless_loop(in_function(body), 4) == 3


@pytest.mark.parametrize(
    "body",
    [
        "while i < limit:\n    i += 1",
        "while True:\n    break",
        "while True:\n    return [1]",
        "while True:\n    work()",  # which may raise
        "while True:\n    i = data[i]",  # as well
        "while True:\n    i = 1 / limit",
        "while self.waits:\n    pass",  # another thread may change it
        "while somewhere_else:\n    pass",
        "while 0:\n    pass",
        "global i\nwhile i < 3:\n    pass",
        "for i in data:\n    pass",
        "while True:\n    yield 1",
        "while (yes := limit):\n    limit = 0",
    ],
)
def test_loop_that_may_end(body):
    source = in_function(body)
    assert [find_endless_loop(source, line) for line in range(1, 8)] == [None] * 7


def test_only_the_loop_around_the_line_counts():
    source = in_function("while True:\n    pass\n") + "\n\ndef other():\n    i = 1\n    return i\n"
    assert find_endless_loop(source, 9) is None
    assert find_endless_loop("while True:\n    pass\n", 2) is None  # a module is not a request
    assert find_endless_loop("def handle(:\n", 1) is None
