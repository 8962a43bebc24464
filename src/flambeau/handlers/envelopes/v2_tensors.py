"""Tensors of KServe's version 2 ↔ nested lists, and ↔ little-endian bytes."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flambeau.errors import BadRequest

DATATYPES = {  # dtype of NumPy and torch → datatype
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
STRUCT_FORMATS = {  # datatype → format character of `struct`
    "BOOL": "?",
    **{f"INT{bits}": letter for bits, letter in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))},
    **{f"UINT{bits}": letter for bits, letter in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))},
    **{f"FP{bits}": letter for bits, letter in ((16, "e"), (32, "f"), (64, "d"))},
}
MAX_DIMENSIONS = 8  # each dimension costs a list per number
_LENGTH = struct.Struct("<I")  # before each element of BYTES


# ---- nested lists ----


def read_input(entry: Any, *, whole: bool = False) -> dict[str, Any]:
    """An input with its data nested to its shape; of BYTES, the first element.

    With `whole`, BYTES of several elements are nested too.
    """
    if not isinstance(entry, Mapping):
        raise BadRequest(f"an input must be an object, not {type(entry).__name__}")
    for key in ("name", "datatype", "data"):
        if key not in entry:
            raise BadRequest(f"an input has no {key!r}; it has {', '.join(map(repr, entry))}")
    data = entry["data"]
    if not isinstance(entry["name"], str):
        raise BadRequest(f"the name of an input must be text, not {type(entry['name']).__name__}")
    if not isinstance(data, list):
        raise BadRequest(f"the data of input {entry['name']!r} must be a list")
    if entry["datatype"] == "BYTES" and not (whole and len(data) > 1):
        if not data:
            raise BadRequest(f"the data of input {entry['name']!r} is empty")
        return {**entry, "data": data[0]}
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape) or len(shape) > MAX_DIMENSIONS:
        raise BadRequest(f"the shape of input {entry['name']!r} must be a list of whole numbers, not {shape!r}")
    flat = [*flatten(data)]
    sizes = resolve_shape(shape, len(flat))
    if sizes is None:
        raise BadRequest(f"input {entry['name']!r} has {len(flat)} elements, which do not make the shape {shape}")
    return {**entry, "data": nest(flat, sizes)}


def to_output(name: str, result: Any) -> dict[str, Any]:
    """A result as a flat tensor. It keeps its dtype; Python numbers have 64 bits."""
    datatype = DATATYPES.get(str(getattr(result, "dtype", "")).removeprefix("torch."))
    flat = [*flatten(result.tolist() if hasattr(result, "tolist") else result)]
    kind = datatype or datatype_of(flat)
    data = [float(value) for value in flat] if kind == "FP64" else flat
    return {"name": name, "datatype": kind, "data": data, "shape": [len(data)]}


def datatype_of(values: Sequence[Any]) -> str:
    """The narrowest datatype that holds all values."""
    kinds = {type(value) for value in values}
    if kinds and kinds <= {bool}:
        return "BOOL"
    if kinds and kinds <= {bool, int}:
        return "INT64"
    return "FP64" if kinds <= {bool, int, float} else "BYTES"


def flatten(value: Any) -> Iterator[Any]:
    """The elements of nested lists, in order."""
    waiting = [iter([value])]  # a stack instead of recursion: clients choose the depth
    while waiting:
        for item in waiting[-1]:
            if isinstance(item, (list, tuple)):
                waiting.append(iter(item))
                break
            yield item
        else:
            waiting.pop()


def resolve_shape(shape: Sequence[int], count: int) -> list[int] | None:
    """The shape with its one -1 resolved; None if `count` elements do not fit it."""
    known = math.prod(size for size in shape if size != -1)
    sizes = [count // known if size == -1 and known else size for size in shape]
    fits = shape.count(-1) <= 1 and min(sizes, default=1) > 0 and math.prod(sizes) == count
    return sizes if fits else None


def nest(flat: Sequence[Any], sizes: Sequence[int]) -> Any:
    if len(sizes) < 2:
        return [*flat] if sizes else flat[0]
    step = math.prod(sizes[1:])
    return [nest(flat[i : i + step], sizes[1:]) for i in range(0, len(flat), step)]


# ---- binary data ----


def unpack_elements(raw: bytes | memoryview, datatype: str) -> list[Any]:
    """The elements of a tensor; those of BYTES as bytes."""
    if datatype == "BYTES":
        return unpack_byte_strings(raw)
    if datatype == "BF16":
        halves = struct.unpack(f"<{count_elements(raw, 2, datatype)}H", raw)
        return array("f", array("I", (half << 16 for half in halves)).tobytes()).tolist()
    letter = STRUCT_FORMATS.get(datatype)
    if letter is None:
        known = ", ".join([*STRUCT_FORMATS, "BF16", "BYTES"])
        raise BadRequest(f"datatype {datatype!r} is not known; it may be {known}")
    return [*struct.unpack(f"<{count_elements(raw, struct.calcsize('<' + letter), datatype)}{letter}", raw)]


def count_elements(raw: bytes | memoryview, size: int, datatype: str) -> int:
    if len(raw) % size:
        raise BadRequest(f"{len(raw)} bytes are not a whole number of {datatype} elements of {size} bytes")
    return len(raw) // size


def unpack_byte_strings(raw: bytes | memoryview) -> list[bytes]:
    elements = []
    at = 0
    while at < len(raw):
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(raw, at)[0] if start <= len(raw) else start
        if end > len(raw):
            raise BadRequest("a BYTES tensor ends in the middle of an element")
        elements.append(bytes(raw[start:end]))
        at = end
    return elements


def pack_elements(values: Sequence[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        raws = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        return b"".join(_LENGTH.pack(len(raw)) + raw for raw in raws)
    if datatype == "BF16":
        words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        return struct.pack(f"<{len(values)}H", *(round_to_bf16(word) for word in words))
    return struct.pack(f"<{len(values)}{STRUCT_FORMATS[datatype]}", *values)


def round_to_bf16(word: int) -> int:
    """The upper half of a float's 32 bits, rounded to nearest even; NaN stays NaN."""
    if word & 0x7FFFFFFF > 0x7F800000:
        return (word >> 16) | 0x40
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16
