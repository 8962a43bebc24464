"""Handlers defined in a script, a notebook or a function become files that another process can import."""

from __future__ import annotations

import linecache
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flambeau.client.handler_capture import write_handler
from flambeau.errors import ConfigError

FACTOR = 3
LIMITS = {"low": [0, 1]}


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, value):
        return math.floor(value * self.by * FACTOR)


trained = Scale(2)
LOCK = threading.Lock()


def scaled(value: Path) -> int:
    return trained(value)


def answer_of(folder, expression):
    """Evaluate in a fresh process that finds nothing but the written files."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import handler; print({expression})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not found.returncode, found.stderr
    return found.stdout.strip()


CONTEXT = "type('Context', (), {'set_response_content_type': lambda *_: None})()"


def test_function_of_one_argument_takes_what_it_refers_to_along(tmp_path):
    def predict(value):
        return [scaled(value), LIMITS["low"]]

    write_handler(predict, tmp_path)
    assert answer_of(tmp_path, f"handler.handle([{{'body': 1.5}}], {CONTEXT})") == "[[9, [0, 1]]]"
    assert answer_of(tmp_path, "handler.handle(None, None)") == "None"


def test_class_inside_a_function_keeps_the_values_around_it(tmp_path):
    offset = 10

    class Shifted:
        def initialize(self, context):
            self.offset = offset

        def handle(self, data, context):
            return [scaled(row["body"]) + self.offset for row in data]

    write_handler(Shifted, tmp_path)
    shown = "(lambda h: (h.initialize(None), h.handle([{'body': 1}], None)))(handler.Shifted())[1]"
    assert answer_of(tmp_path, shown) == "[16]"


def test_handler_of_two_arguments_is_taken_as_it_is(tmp_path):
    def handle_all(data, context):
        return [len(data)]

    write_handler(handle_all, tmp_path)
    assert answer_of(tmp_path, "handler.handle([1, 2], None)") == "[2]"


def test_generators_and_coroutines_stay_what_they_are(tmp_path):
    def count(n):
        yield from range(n)

    async def later(n):
        return n

    async def stream(n):
        for i in range(n):
            yield i

    for function, shown in (
        (count, "list(handler.handle([{'body': 2}], None))"),
        (later, f"__import__('asyncio').run(handler.handle([{{'body': 2}}], {CONTEXT}))"),
        (stream, "__import__('inspect').isasyncgenfunction(handler.handle)"),
    ):
        folder = tmp_path / function.__name__
        write_handler(function, folder)
        assert answer_of(folder, shown) == {"count": "[[0], [1]]", "later": "[2]", "stream": "True"}[function.__name__]


def test_class_of_a_notebook_is_found_by_its_cell(tmp_path):
    cell = "SIZE = 4\n\nclass Cell:\n    def initialize(self, context):\n        self.size = SIZE\n\n"
    cell += "    def handle(self, data, context):\n        return [self.size] * len(data)\n"
    namespace = {"__name__": "__main__"}
    linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 1>")
    exec(compile(cell, "<cell 1>", "exec"), namespace)
    write_handler(namespace["Cell"], tmp_path)
    shown = "(lambda h: (h.initialize(None), h.handle([1], None)))(handler.Cell())[1]"
    assert answer_of(tmp_path, shown) == "[4]"


def test_what_cannot_be_sent_is_named_with_the_remedy(tmp_path):
    def locked(value):
        with LOCK:
            return value

    with pytest.raises(ConfigError, match=r"variable 'LOCK' of type lock.*create it in the handler's initialize"):
        write_handler(locked, tmp_path)
    namespace = {}
    exec("def typed(value): return value", namespace)
    with pytest.raises(ConfigError, match="the source of typed cannot be found; write it to a file"):
        write_handler(namespace["typed"], tmp_path)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (lambda value: value, "written with def"),
        (Scale, "has no initialize and no handle"),
        (trained, "cannot be served"),
        (lambda: None, "cannot be served"),
    ],
)
def test_what_is_no_handler_is_refused(tmp_path, handler, message):
    with pytest.raises(ConfigError, match=message):
        write_handler(handler, tmp_path)


def test_function_without_or_with_three_arguments_is_refused(tmp_path):
    def none():
        return 1

    def three(a, b, c):
        return 1

    for function in (none, three):
        with pytest.raises(ConfigError, match=r"a handler takes \(data, context\), or one argument"):
            write_handler(function, tmp_path)
