"""The JSON object in a request, and the bytes in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flambeau.errors import BadRequest
from flambeau.handlers.requests import decode_base64, value_of


def document_of(row: Any) -> Mapping[str, Any]:
    """The JSON object of a request: its body, parsed here if it came as bytes, or the fields of the row itself."""
    document = row if isinstance(row, Mapping) and not row.keys() & {"data", "body"} else value_of(row)
    if isinstance(document, (bytes, bytearray, str)):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(document, Mapping):
        raise BadRequest(f"the body must be a JSON object, not {type(document).__name__}")
    return document


def list_in(document: Mapping[str, Any], name: str) -> list[Any]:
    """The list of that name in a JSON object."""
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
