"""Whether two replies say the same, and if not, where they differ first."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # what a change of batch size may do to floating-point numbers
MAX_SHOWN = 40


def first_difference(expected: bytes, actual: bytes, path: str = "") -> str | None:
    """Where two replies differ, as `[2].scores.cat: 0.41 vs 0.73`; None where they say the same."""
    if expected == actual:
        return None
    return difference(decode(expected), decode(actual), path)


def decode(reply: bytes) -> Any:
    """A reply as a value: JSON, a tensor that was saved, text, or the bytes themselves."""
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        pass
    torch = sys.modules.get("torch")
    if torch is not None and reply.startswith(b"PK"):
        try:  # a view is saved with all it is a view of, so that equal tensors may have different bytes
            return torch.load(io.BytesIO(reply), weights_only=True).tolist()
        except Exception:  # not ours to judge: then it is bytes
            return reply
    try:
        return reply.decode()
    except UnicodeDecodeError:
        return reply


def difference(one: Any, other: Any, path: str) -> str | None:
    """Where two values differ first, depth first."""
    if is_number(one) and is_number(other):
        return None if is_close(one, other) else f"{path or 'it'}: {one} vs {other}"
    if isinstance(one, dict) and isinstance(other, dict):
        return difference_of_mappings(one, other, path)
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip(one, other, strict=False))
        found = (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
        inner = next((text for text in found if text), None)
        return inner or (None if len(one) == len(other) else f"{path or 'it'}: {len(one)} items vs {len(other)}")
    if type(one) is type(other) and one == other:
        return None
    return f"{path or 'it'}: {shown(one)} vs {shown(other)}"


def difference_of_mappings(one: dict[str, Any], other: dict[str, Any], path: str) -> str | None:
    """Where two mappings differ first: a key that only one has, or a value."""
    for key in [*one, *(key for key in other if key not in one)]:
        inner = f"{path}.{key}"
        if key not in other or key not in one:
            present, absent = ("there", "missing") if key in one else ("missing", "there")
            return f"{inner}: {present} vs {absent}"
        if found := difference(one[key], other[key], inner):
            return found
    return None


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_close(one: float, other: float) -> bool:
    """Equal within the tolerance; NaN equals itself."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def shown(value: Any) -> str:
    """A value, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
