"""Budget: how much a chat template may do, build and write.

A template comes with a model's files. Every loop, call, filter and operator goes through the budget: what would be
too large is rejected before it is built.
"""

from __future__ import annotations

import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

MAX_CHARACTERS = 32 * 1024 * 1024  # written to variables and to the output
MAX_BUILT = 64 * 1024 * 1024  # characters of all values that filters, methods and operators return
MAX_STEPS = 200_000  # loop iterations and calls: a second or two
MAX_SECONDS = 3.0
MAX_BITS = 100_000  # of a number
MAX_DEPTH = 100  # of nested lists
ITEM = 32  # an item of a list counts as so many characters
ESCAPED = 12  # characters that one may become when it is quoted: \\U0001f600, or %F0%9F%98%80


class TemplateRejection(Exception):
    """The template called `raise_exception`: it does not accept the messages."""


class BudgetExceeded(Exception):
    """The template exceeded a limit."""


class Budget(threading.local):
    """What is left of the limits, for each thread that renders."""

    def __init__(self) -> None:
        self.steps = self.characters = self.built = 0
        self.deadline = 0.0

    def reset(self) -> None:
        self.steps, self.characters, self.built = MAX_STEPS, MAX_CHARACTERS, MAX_BUILT
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count one loop iteration or call."""
        self.steps -= 1
        if self.steps < 0:
            raise BudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it takes more than {MAX_SECONDS:g} seconds")

    def write(self, value: Any) -> Any:
        """Count the characters of a value that is written; returns the value."""
        self.characters -= len(value) if isinstance(value, str) else text_size(value)
        if self.characters < 0:
            raise BudgetExceeded(f"it writes more than {MAX_CHARACTERS} characters")
        return value

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop; each is counted."""
        for item in items:
            self.step()
            yield item

    def allow(self, size: int) -> None:
        """Raise if a value of at most this size could be too large."""
        self.check_time()
        if size > self.built:
            raise BudgetExceeded(f"it builds a value of {size} characters, or many of them; {MAX_BUILT} are allowed")

    def build(self, value: Any) -> Any:
        """Count a value that was built; returns the value."""
        if isinstance(value, (str, bytes)):
            self.built -= len(value)
        elif isinstance(value, list | tuple):
            self.built -= ITEM * len(value) + sum(len(item) for item in value if isinstance(item, str))
        elif isinstance(value, dict):
            self.built -= 2 * ITEM * len(value)
        if self.built < 0:
            raise BudgetExceeded(f"it builds more than {MAX_BUILT} characters")
        return value

    def compare(self, value: Any) -> Any:
        """Check an operand of a comparison; returns the operand."""
        if isinstance(value, (list, tuple, dict, AbstractSet)):
            self.allow(text_size(value))
        return value


def text_size(value: Any, depth: int = 0, known: dict[int, int] | None = None) -> int:
    """About how long a value is as text. Lists in lists count as often as they appear; each is looked at once."""
    if isinstance(value, str | bytes):
        return len(value) if depth == 0 else 4 * len(value) + ITEM
    if isinstance(value, Mapping):
        children: Iterable[Any] = (child for pair in value.items() for child in pair)
    elif isinstance(value, list | tuple | AbstractSet):  # sets: the views of a dict
        children = value
    else:
        return ITEM + (value.bit_length() if isinstance(value, int) else 0)
    known = {} if known is None else known
    if id(value) not in known:
        if depth > MAX_DEPTH:
            raise BudgetExceeded(f"it nests lists more than {MAX_DEPTH} deep")
        known[id(value)] = ITEM + sum(text_size(child, depth + 1, known) for child in children)
    return known[id(value)]


def operator_size(operator: str, left: Any, right: Any) -> int:
    """The largest size that the result of an operator can have."""
    if operator == "+" and is_sized(left) and is_sized(right):
        return len(left) + len(right)
    if operator == "*" and (is_sized(left) or is_sized(right)):
        return length(left) * length(right)
    if operator == "%" and isinstance(left, str | bytes):
        return format_size(left, right if isinstance(right, tuple) else (right,))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits if bits <= MAX_BITS else MAX_BUILT * bits
    return 0


def is_sized(value: Any) -> bool:
    return hasattr(value, "__len__")


def length(value: Any) -> int:
    """The items of a text or list; for a number, how often it repeats the other operand."""
    return len(value) if is_sized(value) else abs(int(value)) if isinstance(value, int) else 1


def format_size(text: str | bytes, values: Sequence[Any]) -> int:
    """The largest size of `text % values`: widths may be in the text, or be values (`%*d`)."""
    pattern = text if isinstance(text, str) else text.decode("latin-1")
    fields = re.findall(r"%[^%a-zA-Z]*", pattern)
    widths = sum(int(digits[-10:]) for field in fields for digits in re.findall(r"\d+", field))
    widest = max((ESCAPED * text_size(value) for value in values), default=0)
    if "*" in "".join(fields):
        widths += len(fields) * max((abs(value) for value in values if isinstance(value, int)), default=0)
    return len(text) + widths + len(fields) * widest


def braces_size(text: str, values: Sequence[Any]) -> int:
    """The largest size of `text.format(…)`."""
    fields = [(name or "", spec or "") for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    widths = sum(int(digits[-10:]) for _, spec in fields for digits in re.findall(r"\d+", spec))
    if any("{" in spec for _, spec in fields):
        widths += len(fields) * max((int(value) for value in values if str(value).isdecimal()), default=0)
    return len(text) + widths + len(fields) * max((ESCAPED * text_size(value) for value in values), default=0)


# The largest size that a filter or method returns, from the text or list and all arguments.
Bound = Callable[[Any, Sequence[Any]], int]


def plain_size(value: Any, given: Sequence[Any]) -> int:
    """A result that is at most its inputs, with a number as a width or count."""
    return text_size(value) + sum(
        abs(one) if isinstance(one, int) and not isinstance(one, bool) else text_size(one) for one in given
    )


def replaced_size(value: Any, given: Sequence[Any]) -> int:
    text, old, new = str(value), str(given[0]) if given else "", str(given[1]) if len(given) > 1 else ""
    return len(text) + text.count(old) * len(new)


def joined_size(value: Any, given: Sequence[Any]) -> int:
    """`list | join(text)` or `text.join(list)`."""
    items, between = (given[0], value) if isinstance(value, str) and given else (value, given[0] if given else "")
    if not is_sized(items):
        return 0  # the caller has made a list of it
    return text_size(items) + len(items) * text_size(between)


def indented_size(value: Any, given: Sequence[Any]) -> int:
    text = str(value)
    width = max((one if isinstance(one, int) else len(str(one)) for one in given), default=4)
    return len(text) + (text.count("\n") + 1) * abs(width)


def split_size(value: Any, given: Sequence[Any]) -> int:
    size, between = len(value), given[0] if given else None
    if isinstance(between, str | bytes) and between:
        return size + ITEM * int(value.count(between))
    return size + ITEM * (size // 2)


def listed_size(value: Any, given: Sequence[Any]) -> int:
    """A result, or a list on the way to it, with an item for every character."""
    return ITEM * length(value) + plain_size(value, given)


def wrapped_size(value: Any, given: Sequence[Any]) -> int:
    return len(str(value)) * (ITEM + max((len(one) for one in given if isinstance(one, str)), default=1))


def mapped_size(value: Any, given: Sequence[Any]) -> int:
    table = given[0] if given and isinstance(given[0], Mapping) else {}
    return len(value) * max((text_size(one) for one in table.values()), default=1)


def escaped_size(value: Any, given: Sequence[Any]) -> int:
    """JSON and other quoted text: every character may be escaped, every item be on a line of its own."""
    size, numbers = text_size(value), [one for one in given if isinstance(one, int)]
    texts = sum(text_size(one) for one in given if not isinstance(one, int))
    return ESCAPED * size + (size // ITEM + 1) * (texts + max(map(abs, numbers), default=0) * MAX_DEPTH)


BOUNDS: Mapping[str, Bound] = {
    "replace": replaced_size,
    "join": joined_size,
    "indent": indented_size,
    "expandtabs": lambda value, given: len(value) * max(8, *(abs(one) for one in given if isinstance(one, int)), 1),
    "split": split_size,
    "rsplit": split_size,
    "splitlines": lambda value, given: ITEM * len(value),
    "list": listed_size,
    "title": listed_size,
    "wordcount": listed_size,
    "urlize": listed_size,
    "striptags": listed_size,
    "wordwrap": wrapped_size,
    "translate": mapped_size,
    "format": lambda value, given: format_size(str(value), given),
    "tojson": escaped_size,
    "pprint": escaped_size,
    "escape": escaped_size,
    "e": escaped_size,
    "forceescape": escaped_size,
    "urlencode": escaped_size,
    "xmlattr": escaped_size,
    "encode": escaped_size,
    # The sum of lists copies them again and again.
    "sum": lambda value, given: text_size(value) * (1 if all(not is_sized(one) for one in given) else MAX_BUILT),
}


def result_size(name: str, value: Any, given: Sequence[Any]) -> int:
    """The largest size that a filter or method of this name can return."""
    return BOUNDS.get(name, plain_size)(value, given)
