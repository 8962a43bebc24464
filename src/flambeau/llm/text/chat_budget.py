"""Budget: how much one rendering of a chat template may do. A template is code and must end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

MAX_CHARACTERS = 32 * 1024 * 1024  # written, into variables and out
MAX_STEPS = 200_000  # loop rounds and calls: a second or two
MAX_SECONDS = 10.0


class Refused(Exception):
    """The template called `raise_exception`: the messages are not what it takes."""


class Exhausted(Exception):
    """The template went beyond a limit."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self.steps = self.characters = 0
        self.deadline = 0.0

    def reset(self) -> None:
        """Begin a rendering."""
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count one loop round or call."""
        self.steps -= 1
        if self.steps < 0:
            raise Exhausted(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise Exhausted(f"it takes more than {MAX_SECONDS:g} seconds")

    def write(self, value: Any) -> Any:
        """Count what is written out, into a variable too."""
        if isinstance(value, str):
            self.characters -= len(value)
            if self.characters < 0:
                raise Exhausted(f"it writes more than {MAX_CHARACTERS} characters")
        return value

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, each counted."""
        for item in items:
            self.step()
            yield item

    def check_size(self, operator: str, left: Any, right: Any) -> None:
        """Refuse to build a text, list or number that is too large."""
        size = 0
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            size = len(left) + len(right)
        elif operator == "*":
            size = length(left) * length(right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right)
        if size > MAX_CHARACTERS:
            raise Exhausted(f"it builds a value of {size} characters")


def length(value: Any) -> int:
    """How many items a text or list has, how many times a number repeats it."""
    return len(value) if hasattr(value, "__len__") else abs(int(value)) if isinstance(value, int) else 1
