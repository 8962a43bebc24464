"""Budget: limits of one rendering of a chat template, which is code and must terminate."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

MAX_CHARACTERS = 32 * 1024 * 1024  # written to variables and to the output
MAX_STEPS = 200_000  # loop iterations and calls: a second or two
MAX_SECONDS = 10.0


class TemplateRejection(Exception):
    """The template called `raise_exception`: it does not accept the messages."""


class BudgetExceeded(Exception):
    """The template exceeded a limit."""


class Budget:
    """What is left of the limits."""

    def __init__(self) -> None:
        self.steps = self.characters = 0
        self.deadline = 0.0

    def reset(self) -> None:
        self.steps, self.characters = MAX_STEPS, MAX_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count one loop iteration or call."""
        self.steps -= 1
        if self.steps < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it takes more than {MAX_SECONDS:g} seconds")

    def write(self, value: Any) -> Any:
        """Count the characters of a value that is written; returns the value."""
        if isinstance(value, str):
            self.characters -= len(value)
            if self.characters < 0:
                raise BudgetExceeded(f"it writes more than {MAX_CHARACTERS} characters")
        return value

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop; each is counted."""
        for item in items:
            self.step()
            yield item

    def check_size(self, operator: str, left: Any, right: Any) -> None:
        """Raise before a text, list or number becomes too large."""
        size = 0
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            size = len(left) + len(right)
        elif operator == "*":
            size = length(left) * length(right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right)
        if size > MAX_CHARACTERS:
            raise BudgetExceeded(f"it builds a value of {size} characters")


def length(value: Any) -> int:
    """The items of a text or list; for a number, how often it repeats the other operand."""
    return len(value) if hasattr(value, "__len__") else abs(int(value)) if isinstance(value, int) else 1
