"""An inference request of KServe's second protocol, with or without binary data behind its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest
from flambeau.handlers.envelopes.binary_v2 import unpack
from flambeau.handlers.envelopes.documents import document_of
from flambeau.handlers.requests import value_of

if TYPE_CHECKING:
    from flambeau.worker.context import Context

HEADER = "Inference-Header-Content-Length"  # how much of the body is JSON; the tensors follow it


def read_request(row: Any, context: Context, i: int) -> Mapping[str, Any]:
    """The JSON object of a request, in which every input has its data as a list."""
    length = header_of(context, i)
    if length is None:
        return document_of(row)
    raw = value_of(row)
    if not isinstance(raw, (bytes, bytearray)):
        raise BadRequest(f"{HEADER} is for bodies with binary data; this one is JSON throughout")
    if not length.isdecimal() or int(length) > len(raw):
        raise BadRequest(f"{HEADER} is {length!r}; the body has {len(raw)} bytes")
    view = memoryview(raw)
    document = document_of({"body": bytes(view[: int(length)])})
    return {**document, "inputs": put_in(document.get("inputs"), view[int(length) :])}


def header_of(context: Context, i: int) -> str | None:
    """The header that tells where the JSON ends, whatever its case."""
    wanted = HEADER.lower()
    headers = context.get_all_request_header(i)
    return next((str(value) for name, value in headers.items() if name.lower() == wanted), None)


def put_in(inputs: Any, rest: memoryview) -> Any:
    """The inputs with their binary data, which lies in the order of the inputs."""
    if not isinstance(inputs, list):
        return inputs
    filled = []
    for entry in inputs:
        size = binary_size(entry)
        if size is None:
            filled.append(entry)
            continue
        if size > len(rest):
            raise BadRequest(f"input {entry.get('name')!r} has {size} bytes of binary data; {len(rest)} are left")
        filled.append({**entry, "data": unpack(rest[:size], str(entry.get("datatype")))})
        rest = rest[size:]
    if len(rest):
        raise BadRequest(f"{len(rest)} bytes of binary data belong to no input")
    return filled


def binary_size(entry: Any) -> int | None:
    """How many bytes of binary data an input has; None if its data is in the JSON."""
    parameters = entry.get("parameters") if isinstance(entry, Mapping) else None
    size = parameters.get("binary_data_size") if isinstance(parameters, Mapping) else None
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise BadRequest(f"binary_data_size must be a number of bytes, not {size!r}")
    return size
