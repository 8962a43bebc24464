"""Tensors of the Open Inference Protocol: elements in messages ↔ little-endian bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flambeau.frontend.grpc.messages import MalformedMessage

FIELDS = {  # datatype → the field of InferTensorContents, and the format of an element in `struct`
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}
RAW_ONLY = {"FP16": "e", "BF16": ""}  # no field holds them
BYTES = "BYTES"
CHUNK = 32_768  # elements converted at a time; other threads run in between
FIELD_NAMES = [*dict.fromkeys(name for name, _ in FIELDS.values()), "bytes_contents"]
_LENGTH = struct.Struct("<I")  # before each element of BYTES


def contents_of(name: str, datatype: str, contents: Any) -> Any:
    """The elements of an input with typed contents."""
    if datatype in RAW_ONLY:
        raise MalformedMessage(f"input {name!r}: {datatype} has no typed contents; send it in raw_input_contents")
    if datatype == BYTES:
        return contents.bytes_contents
    if datatype not in FIELDS:
        known = ", ".join([*FIELDS, *RAW_ONLY, BYTES])
        raise MalformedMessage(f"input {name!r}: datatype {datatype!r} is not known; it may be {known}")
    return getattr(contents, FIELDS[datatype][0])


def pack(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == BYTES:
        return b"".join(_LENGTH.pack(len(element)) + element for element in map(to_bytes, values))
    letter = FIELDS[datatype][1] if datatype in FIELDS else RAW_ONLY.get(datatype, "")
    try:
        return b"".join(struct.pack(f"<{len(chunk)}{letter}", *chunk) for chunk in in_chunks(values))
    except struct.error as error:
        raise MalformedMessage(f"the contents are not {datatype}: {error}") from None


def unpack(datatype: str, raw: bytes) -> Sequence[Any]:
    """The elements of a tensor; those of BYTES are bytes."""
    if datatype == BYTES:
        return [*_elements(raw)]
    letter = FIELDS[datatype][1] if datatype in FIELDS else RAW_ONLY.get(datatype, "")
    size = struct.calcsize(f"<{letter}")
    if not size or len(raw) % size:
        raise MalformedMessage(f"{len(raw)} bytes cannot be read as {datatype} elements")
    found: list[Any] = []
    for start in range(0, len(raw), CHUNK * size):
        chunk = raw[start : start + CHUNK * size]
        found += struct.unpack(f"<{len(chunk) // size}{letter}", chunk)
    return found


def in_chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Slices of the values; at least one."""
    if len(values) <= CHUNK:
        yield values
        return
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def to_json(value: Any) -> Iterator[str]:
    """A document as JSON, in pieces that are quick to make."""
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"{', ' if i else '{'}{json.dumps(key)}: "
            yield from to_json(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield ", " if i else "["
            yield from to_json(item)
        yield "]"
    elif isinstance(value, list):
        for i, chunk in enumerate(in_chunks(value)):
            yield f"{', ' if i else '['}{json.dumps(chunk)[1:-1]}"
        yield "]"
    else:
        yield json.dumps(value)


def _elements(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        start = at + _LENGTH.size
        end = start + _LENGTH.unpack_from(raw, at)[0] if start <= len(raw) else start
        if end > len(raw):
            raise MalformedMessage("a BYTES tensor ends in the middle of an element")
        yield raw[start:end]
        at = end


def put_contents(contents: Any, datatype: str, values: Iterable[Any]) -> None:
    if datatype == BYTES:
        contents.bytes_contents.extend(map(to_bytes, values))
    else:
        getattr(contents, FIELDS[datatype][0]).extend(values)


def to_bytes(element: Any) -> bytes:
    """An element of BYTES: text as UTF-8, other values as JSON."""
    if isinstance(element, bytes):
        return element
    return (element if isinstance(element, str) else json.dumps(element)).encode("utf-8", "backslashreplace")


def flatten(value: Any) -> Iterator[Any]:
    """The elements of nested lists, in order."""
    waiting = [iter([value])]  # a stack instead of recursion: handlers choose the depth
    while waiting:
        for item in waiting[-1]:
            if isinstance(item, list):
                waiting.append(iter(item))
                break
            yield item
        else:
            waiting.pop()
