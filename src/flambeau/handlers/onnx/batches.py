"""Which requests an ONNX model runs together, and how its outputs are shared out again (no session in here)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flambeau.handlers.onnx.inputs import Example, InputSpec
from flambeau.handlers.onnx.npy import Array

# A first axis of such a name is no row of independent examples: joining requests along it would change their answers.
NOT_ROWS = ("seq", "len", "time", "token", "frame", "step")


def has_batch_axis(specs: Sequence[InputSpec], outputs: Sequence[Any]) -> bool:
    """Whether every input and output begins with an axis of free length that stands for examples."""
    firsts = [spec.dims[0] if spec.dims else 0 for spec in specs]
    if not firsts or any(isinstance(first, int) for first in firsts) or len(set(firsts)) > 1:
        return False
    if any(word in str(firsts[0]).lower() for word in NOT_ROWS):
        return False
    return all(o.type.startswith("tensor") and o.shape and not isinstance(o.shape[0], int) for o in outputs)


def group_alike(examples: Sequence[Example]) -> list[list[int]]:
    """The examples that can be joined, by their places: equal in all but the number of rows."""
    groups: dict[object, list[int]] = {}
    for i, example in enumerate(examples):
        rows = {array.shape[0] for array in example.arrays.values()}
        alike = tuple(array.shape[1:] for array in example.arrays.values())
        groups.setdefault(alike if len(rows) == 1 else i, []).append(i)
    return list(groups.values())


def join(examples: Sequence[Example]) -> dict[str, Array]:
    """The arrays of several examples as one batch."""
    return {name: np.concatenate([example.arrays[name] for example in examples]) for name in examples[0].arrays}


def split(outputs: Sequence[Any], examples: Sequence[Example]) -> list[list[Any]] | None:
    """Each example's rows of each output; None when an output does not have one row for each row that went in."""
    counts = [len(next(iter(example.arrays.values()))) for example in examples]
    if any(not isinstance(output, np.ndarray) or output.shape[:1] != (sum(counts),) for output in outputs):
        return None
    ends = np.cumsum(counts).tolist()
    return [[output[end - count : end] for output in outputs] for end, count in zip(ends, counts, strict=True)]


def without_batch_axis(output: Any) -> Any:
    """The one row of an output; an output that has no such axis as it is."""
    has_one = output.shape[:1] == (1,) if isinstance(output, np.ndarray) else isinstance(output, list)
    return output[0] if has_one and len(output) == 1 else output
