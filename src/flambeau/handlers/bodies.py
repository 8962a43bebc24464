"""What the built-in handlers take out of a request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sized
from typing import Any

from flambeau.errors import BadRequest


def value_of(row: Any) -> Any:
    """What a request holds under `data` or `body`; a row that is no mapping was taken out by an envelope."""
    if not isinstance(row, Mapping):
        return row
    for key in ("data", "body"):
        value = row.get(key)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            return value
    if "data" in row or "body" in row:
        raise BadRequest("the request is empty")
    raise BadRequest(f"the request has neither 'data' nor 'body'; it has {', '.join(map(repr, row)) or 'nothing'}")


def decode_base64(text: Any) -> bytes:
    """The bytes behind a base64 text, which may be broken into lines."""
    if not isinstance(text, str):
        raise BadRequest(f"base64 must be text, not {type(text).__name__}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the text is not base64: {error}") from None


def target_of(value: Any) -> int:
    """The class that an explanation is asked about; form fields arrive as bytes."""
    if isinstance(value, (bytes, bytearray)):
        value = value.decode("utf-8", "replace")
    try:
        return int(value)
    except (TypeError, ValueError):
        raise BadRequest(f"target must be the number of a class, not {value!r}") from None
