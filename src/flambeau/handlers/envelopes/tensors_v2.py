"""The tensors of KServe's second protocol ↔ nested lists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flambeau.errors import BadRequest

DATATYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
MAX_DIMENSIONS = 8  # each one more costs a list for every number


def read_input(entry: Any, *, whole: bool = False) -> dict[str, Any]:
    """One input as the handler gets it: its data nested to its shape, or the first element if it is BYTES.

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
    sizes = sizes_for(shape, len(flat))
    if sizes is None:
        raise BadRequest(f"input {entry['name']!r} has {len(flat)} elements, which do not make the shape {shape}")
    return {**entry, "data": nest(flat, sizes)}


def to_output(name: str, result: Any) -> dict[str, Any]:
    """One result as a flat tensor; what has a dtype keeps it, Python's numbers have 64 bits."""
    datatype = DATATYPES.get(str(getattr(result, "dtype", "")).removeprefix("torch."))
    flat = [*flatten(result.tolist() if hasattr(result, "tolist") else result)]
    kind = datatype or datatype_of(flat)
    data = [float(value) for value in flat] if kind == "FP64" else flat
    return {"name": name, "datatype": kind, "data": data, "shape": [len(data)]}


def datatype_of(values: Sequence[Any]) -> str:
    """The narrowest type that all values of a list share."""
    kinds = {type(value) for value in values}
    if kinds and kinds <= {bool}:
        return "BOOL"
    if kinds and kinds <= {bool, int}:
        return "INT64"
    return "FP64" if kinds <= {bool, int, float} else "BYTES"


def flatten(value: Any) -> Iterator[Any]:
    """The elements of nested lists, in order; what is no list is an element."""
    waiting = [iter([value])]  # a stack instead of recursion: clients choose the depth
    while waiting:
        for item in waiting[-1]:
            if isinstance(item, (list, tuple)):
                waiting.append(iter(item))
                break
            yield item
        else:
            waiting.pop()


def sizes_for(shape: Sequence[int], count: int) -> list[int] | None:
    """The shape with its one -1 resolved; None when so many elements do not make it."""
    known = math.prod(size for size in shape if size != -1)
    sizes = [count // known if size == -1 and known else size for size in shape]
    fits = shape.count(-1) <= 1 and min(sizes, default=1) > 0 and math.prod(sizes) == count
    return sizes if fits else None


def nest(flat: Sequence[Any], sizes: Sequence[int]) -> Any:
    """A flat list as nested ones."""
    if len(sizes) < 2:
        return [*flat] if sizes else flat[0]
    step = math.prod(sizes[1:])
    return [nest(flat[i : i + step], sizes[1:]) for i in range(0, len(flat), step)]
