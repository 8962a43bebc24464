"""The binary tensor data extension of KServe's second protocol: little-endian bytes ↔ flat lists."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any

from flambeau.errors import BadRequest

LETTERS = {  # what `struct` calls each datatype
    "BOOL": "?",
    **{f"INT{bits}": letter for bits, letter in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))},
    **{f"UINT{bits}": letter for bits, letter in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))},
    **{f"FP{bits}": letter for bits, letter in ((16, "e"), (32, "f"), (64, "d"))},
}
_LENGTH = struct.Struct("<I")  # stands before each element of BYTES


def unpack(raw: bytes | memoryview, datatype: str) -> list[Any]:
    """The elements of a tensor; those of BYTES as bytes."""
    if datatype == "BYTES":
        return unpack_bytes(raw)
    if datatype == "BF16":
        halves = struct.unpack(f"<{count_of(raw, 2, datatype)}H", raw)
        return array("f", array("I", (half << 16 for half in halves)).tobytes()).tolist()
    letter = LETTERS.get(datatype)
    if letter is None:
        raise BadRequest(f"datatype {datatype!r} is not known; it may be {', '.join([*LETTERS, 'BF16', 'BYTES'])}")
    return [*struct.unpack(f"<{count_of(raw, struct.calcsize('<' + letter), datatype)}{letter}", raw)]


def count_of(raw: bytes | memoryview, size: int, datatype: str) -> int:
    """How many elements of that size the bytes hold."""
    if len(raw) % size:
        raise BadRequest(f"{len(raw)} bytes are no whole number of {datatype} elements, which have {size} bytes each")
    return len(raw) // size


def unpack_bytes(raw: bytes | memoryview) -> list[bytes]:
    """Elements of any length, each behind its length."""
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


def pack(values: Sequence[Any], datatype: str) -> bytes:
    """The bytes of a tensor's elements."""
    if datatype == "BYTES":
        raws = [value if isinstance(value, bytes) else str(value).encode() for value in values]
        return b"".join(_LENGTH.pack(len(raw)) + raw for raw in raws)
    if datatype == "BF16":
        words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        return struct.pack(f"<{len(values)}H", *(round_to_bf16(word) for word in words))
    return struct.pack(f"<{len(values)}{LETTERS[datatype]}", *values)


def round_to_bf16(word: int) -> int:
    """The upper half of a float's 32 bits, rounded to the nearest, to even between two; NaN stays NaN."""
    if word & 0x7FFFFFFF > 0x7F800000:
        return (word >> 16) | 0x40
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16
