"""What built-in handlers ask of a row and of the call it came with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest

if TYPE_CHECKING:
    from flambeau.worker.context import Context


def value_of(row: Mapping[str, Any]) -> Any:
    """The field `data` of a form or the plain body; a form without `data` as a whole."""
    for key in ("data", "body"):
        if row.get(key) is not None:
            return row[key]
    if "body" in row:
        raise BadRequest("the body is null; send JSON with a value in it")
    return dict(row)


def parse_json_bytes(raw: bytes | bytearray, remedy: str) -> Any:
    """JSON that came without its content type."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON ({error}); {remedy}") from None


def is_describe(context: Context) -> bool:
    """Whether this call is `describe?customized=true`."""
    return bool(context.get_request_header(0, "describe") == "True")


def refuse_explain(context: Context, handler: str) -> None:
    """Answer /explanations with a reason."""
    if context.get_request_header(0, "explain") == "True":
        raise BadRequest(f"{handler} has no explanations; pack a handler of your own with explain_handle")
