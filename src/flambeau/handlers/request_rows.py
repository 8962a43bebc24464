"""Values of request rows, and flags of a call, for the built-in handlers."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, json_problem

if TYPE_CHECKING:
    from flambeau.worker.context import Context


def value_of(row: Any) -> Any:
    """The value under `data` or `body`; a row that is not a mapping comes from an envelope and is the value."""
    if not isinstance(row, Mapping):
        return row
    for key in ("data", "body"):
        value = row.get(key)
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            return value
    if "data" in row or "body" in row:
        raise BadRequest("the request is empty")
    found = ", ".join(repr(str(key)[:40]) for key in [*row][:5]) or "nothing"
    raise BadRequest(
        f"the request is a form without the field 'data'; it has {found}. curl sends a form unless it has a "
        "content type: use -T FILE, or -H 'content-type: …'"
    )


def content_of(row: Any) -> Any:
    """The value of a row; of a JSON body `{"data": …}`, what is under `data`."""
    value = value_of(row)
    return value_of(value) if isinstance(value, Mapping) and value.keys() & {"data", "body"} else value


def explained(row: Any) -> tuple[Any, Any]:
    """What a request for an explanation sends, and its `target`: fields of a form, or of a JSON body."""
    fields = row if isinstance(row, Mapping) else {"data": row}  # an envelope passes plain values
    inputs = fields.get("data") or fields.get("body")
    target = fields.get("target")
    if target is None and isinstance(inputs, Mapping):
        target = inputs.get("target")
    return inputs, target or 0


def decode_base64(text: Any) -> bytes:
    """Decode base64 text, which may have line breaks."""
    if not isinstance(text, str):
        raise BadRequest(f"base64 must be text, not {type(text).__name__}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"the text is not base64: {error}") from None


def target_of(value: Any) -> int:
    """The class index to explain; form fields arrive as bytes."""
    if isinstance(value, (bytes, bytearray)):
        value = value.decode("utf-8", "replace")
    try:
        return int(value)
    except (TypeError, ValueError):
        raise BadRequest(f"target must be a class index, not {value!r}") from None


def value_or_fields(row: Mapping[str, Any]) -> Any:
    """The field `data` of a form or the plain body; a form without `data` as a dict."""
    for key in ("data", "body"):
        if row.get(key) is not None:
            return row[key]
    if "body" in row:
        raise BadRequest("the body is null; send JSON with a value in it")
    return dict(row)


def parse_json_bytes(raw: bytes | bytearray, remedy: str) -> Any:
    """Parse JSON that came without its content type."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {json_problem(error)}; {remedy}") from None


def is_describe(context: Context) -> bool:
    return bool(context.get_request_header(0, "describe") == "True")


def refuse_explain(context: Context, handler: str) -> None:
    """Reject /explanations for a handler that has none."""
    if context.get_request_header(0, "explain") == "True":
        raise BadRequest(f"{handler} has no explanations; pack a handler of your own with explain_handle")
