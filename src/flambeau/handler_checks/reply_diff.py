"""Compares two replies and finds the first difference."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any

# Floating-point results may change by this much with the batch size.
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-4, 1e-5
MAX_SHOWN = 40


def first_difference(expected: bytes, actual: bytes, path: str = "") -> str | None:
    """Where two replies differ, as `[2].scores.cat: 0.41 vs 0.73`; None if they are equal."""
    if expected == actual:
        return None
    return difference(decode(expected), decode(actual), path)


def decode(reply: bytes) -> Any:
    """A reply as a value: JSON, a saved tensor, text, or the bytes themselves."""
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        pass
    torch = sys.modules.get("torch")
    if torch is not None and reply.startswith(b"PK"):
        try:  # torch saves a view with its whole storage, so equal tensors may have different bytes
            return torch.load(io.BytesIO(reply), weights_only=True).tolist()
        except Exception:  # a zip file that is no tensor
            return reply
    try:
        return reply.decode()
    except UnicodeDecodeError:
        return reply


def difference(one: Any, other: Any, path: str) -> str | None:
    """The first difference between two values, depth first."""
    if is_number(one) and is_number(other):
        return None if is_close(one, other) else f"{path or 'it'}: {one} vs {other}"
    if isinstance(one, dict) and isinstance(other, dict):
        return mapping_difference(one, other, path)
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip(one, other, strict=False))
        found = (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
        inner = next((text for text in found if text), None)
        return inner or (None if len(one) == len(other) else f"{path or 'it'}: {len(one)} items vs {len(other)}")
    if type(one) is type(other) and one == other:
        return None
    return f"{path or 'it'}: {shown(one)} vs {shown(other)}"


def mapping_difference(one: dict[str, Any], other: dict[str, Any], path: str) -> str | None:
    for key in [*one, *(key for key in other if key not in one)]:
        inner = f"{path}.{key}"
        if key not in other or key not in one:
            left, right = ("present", "missing") if key in one else ("missing", "present")
            return f"{inner}: {left} vs {right}"
        if found := difference(one[key], other[key], inner):
            return found
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_close(one: float, other: float) -> bool:
    """Equal within the tolerance; NaN equals NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
