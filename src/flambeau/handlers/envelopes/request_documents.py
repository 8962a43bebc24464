"""The JSON document of a request, with or without the binary tensor data of KServe's version 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, json_problem
from flambeau.handlers.envelopes.v2_tensors import unpack_elements
from flambeau.handlers.request_rows import decode_base64, value_of

if TYPE_CHECKING:
    from flambeau.worker.context import Context

HEADER = "Inference-Header-Content-Length"  # size of the JSON at the start of the body; binary data follows it


def document_of(row: Any) -> Mapping[str, Any]:
    """The JSON object of a request: its body, or the row itself if it has neither `data` nor `body`."""
    document = row if isinstance(row, Mapping) and not row.keys() & {"data", "body"} else value_of(row)
    if isinstance(document, (bytes, bytearray, str)):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {json_problem(error)}") from None
    if not isinstance(document, Mapping):
        raise BadRequest(f"the body must be a JSON object, not {type(document).__name__}")
    return document


def list_in(document: Mapping[str, Any], name: str) -> list[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        raise BadRequest(f"the body must have a list {name!r}; it has {', '.join(map(repr, document)) or 'nothing'}")
    return found


def decode_bytes(instance: Any) -> Any:
    """`{"b64": "…"}`, alone or as a value of an object, → bytes."""
    if not isinstance(instance, dict):
        return instance
    if instance.keys() == {"b64"}:
        return decode_base64(instance["b64"])
    return {
        key: decode_base64(value["b64"]) if isinstance(value, dict) and value.keys() == {"b64"} else value
        for key, value in instance.items()
    }


# ---- KServe's binary tensor data extension ----


def read_request(row: Any, context: Context, i: int) -> Mapping[str, Any]:
    """The JSON object of request `i`, with binary data unpacked into the `data` of each input."""
    length = header_of(context, i)
    if length is None:
        return document_of(row)
    raw = value_of(row)
    if not isinstance(raw, (bytes, bytearray)):
        raise BadRequest(f"{HEADER} is for bodies with binary data; this body is JSON")
    if not length.isdecimal() or int(length) > len(raw):
        raise BadRequest(f"{HEADER} is {length!r}; the body has {len(raw)} bytes")
    view = memoryview(raw)
    document = document_of({"body": bytes(view[: int(length)])})
    return {**document, "inputs": attach_binary_data(document.get("inputs"), view[int(length) :])}


def header_of(context: Context, i: int) -> str | None:
    wanted = HEADER.lower()
    read = getattr(context, "get_all_request_header", None)  # tests of handlers have contexts of their own
    headers = read(i) if read is not None else {}
    return next((str(value) for name, value in headers.items() if name.lower() == wanted), None)


def attach_binary_data(inputs: Any, rest: memoryview) -> Any:
    """The inputs with their binary data, which follows in the order of the inputs."""
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
        filled.append({**entry, "data": unpack_elements(rest[:size], str(entry.get("datatype")))})
        rest = rest[size:]
    if len(rest):
        raise BadRequest(f"{len(rest)} bytes of binary data belong to no input")
    return filled


def binary_size(entry: Any) -> int | None:
    """The size of an input's binary data in bytes; None if its data is in the JSON."""
    parameters = entry.get("parameters") if isinstance(entry, Mapping) else None
    size = parameters.get("binary_data_size") if isinstance(parameters, Mapping) else None
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise BadRequest(f"binary_data_size must be a number of bytes, not {size!r}")
    return size
