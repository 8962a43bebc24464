"""The body of a request that a model accepts, as a worker reports it: JSON, or a short expression for a large one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LISTED = 64  # numbers that are written one by one
MAX_CHARACTERS = 2000
# A gray picture of 32 by 32 pixels, in base64: the line works before you have one of your own.
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAFklEQVR42mNoIAAYRhWMKhhVMFIVAABCAAAfN5c2AAAAAABJRU5ErkJggg=="
SOUND = '{"inputs": {"array": [0.0]*16000, "sampling_rate": 16000}}'  # a second of silence


class Expression(str):
    """Python that evaluates to the body, such as `[[0.5]*224]*224`; JSON too, if it is short."""

    __slots__ = ()


def of_shape(shape: Sequence[int], value: float | str) -> Expression:
    """An array of this shape in which every element is `value`."""
    if math.prod(shape) <= MAX_LISTED:
        listed: Any = value
        for size in reversed(shape):
            listed = [listed] * size
        return Expression(json.dumps(listed))
    text = repr(value)
    for size in reversed(shape):
        text = f"[{text}]*{size}"
    return Expression(text)


def of_inputs(inputs: Mapping[str, Expression]) -> Expression:
    """A body with several inputs by name; the only input of a model needs no name."""
    if len(inputs) == 1:
        return next(iter(inputs.values()))
    return Expression("{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in inputs.items()) + "}")


def to_text(example: Any) -> str:
    """What a worker reports about its handler's example; empty if it is no JSON, or long."""
    if isinstance(example, Expression):
        return str(example)
    try:
        text = json.dumps(example)
    except (TypeError, ValueError, RecursionError):
        return ""
    return text if len(text) <= MAX_CHARACTERS else ""


def to_body(text: str) -> bytes:
    """The body that an example stands for."""
    return text.encode() if is_json(text) else json.dumps(eval(text, {"__builtins__": {}})).encode()


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
