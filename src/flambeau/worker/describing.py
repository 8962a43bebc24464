"""What a value is, in a few words: its type, its shape or size, and where it lies (pure; no torch needed)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

MAX_KEYS = 6
MAX_DEPTH = 3


def describe(value: Any, depth: int = 0) -> str:
    """`Tensor float32 (2, 3) cpu`, `list of 2 dict`, `bytearray 13.2 kB`, …"""
    name = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, complex)):
        return "None" if value is None else f"{name} {value}"
    if isinstance(value, str):
        return f"{name} of {len(value)} characters"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{name} {size_text(memoryview(value).nbytes)}"
    if is_array(value):
        return describe_array(value)
    if isinstance(value, Mapping):
        return describe_mapping(value, depth)
    if isinstance(value, (Sequence, Set)):
        return f"{name} of {len(value)}{describe_items([*value])}"
    return describe_picture(value) or name


def describe_array(value: Any) -> str:
    """A tensor, array or data frame: type, element type, shape, device."""
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    device = str(getattr(value, "device", ""))
    words = [type(value).__name__, kind, str(tuple(value.shape)), device]
    return " ".join(word for word in words if word)


def describe_mapping(value: Mapping[Any, Any], depth: int) -> str:
    """By key where tensors are inside, else only the keys."""
    name, shown = type(value).__name__, [*value][:MAX_KEYS]
    more = ", …" if len(value) > MAX_KEYS else ""
    if depth < MAX_DEPTH and has_array(value, MAX_DEPTH - depth):
        inner = ", ".join(f"{key}: {describe(value[key], depth + 1)}" for key in shown)
        return f"{'' if name == 'dict' else f'{name} '}{{{inner}{more}}}"
    keys = ", ".join(str(key)[:20] for key in shown)
    return f"{name} of {len(value)}" + (f" ({keys}{more})" if keys else "")


def describe_items(items: Sequence[Any]) -> str:
    """What the items of a list have in common."""
    kinds = sorted({type(item).__name__ for item in items})
    if len(kinds) != 1:
        return f" ({', '.join(kinds[:MAX_KEYS])})" if kinds else ""
    if is_array(items[0]) and len(texts := {describe_array(item) for item in items}) == 1:
        return f" {texts.pop()}"
    return f" {kinds[0]}"


def describe_picture(value: Any) -> str:
    """A PIL image: type, mode and size; empty for anything else."""
    mode, size = getattr(value, "mode", None), getattr(value, "size", None)
    if isinstance(mode, str) and isinstance(size, tuple) and len(size) == 2:
        return f"{type(value).__name__} {mode} {size[0]}×{size[1]}"
    return ""


def is_array(value: Any) -> bool:
    """Whether a value has a shape, as tensors and arrays of any library do."""
    return isinstance(getattr(value, "shape", None), tuple)


def has_array(value: Any, depth: int) -> bool:
    """Whether a mapping holds an array, maybe some levels down."""
    if isinstance(value, Mapping) and depth > 0:
        return any(has_array(item, depth - 1) for item in [*value.values()][:MAX_KEYS])
    return is_array(value)


def size_text(size_bytes: int) -> str:
    """`812 B`, `13.2 kB`, `4.0 MB`."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size, unit = size_bytes / 1000, "kB"
    for unit in ("kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.1f} {unit}"
