"""What the server itself reads of a body: almost nothing, for bodies are the worker's business."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl

from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from flambeau.errors import BadRequest, NotJson
from flambeau.frontend.http.exchange import Exchange

MODEL_NAME = "model_name"
NEARLY_JSON_BYTES = 64 * 1024


def bytes_of(exchange: Exchange) -> bytes:
    """The body of a request, which stays with it."""
    body = exchange.body
    if body is None:
        return b""
    return body.content if body.segment is None else bytes(body.segment.memory[: body.size_bytes])


def media_type_of(exchange: Exchange) -> str:
    """The content type of a request without its parameters."""
    return (exchange.header("content-type") or "").partition(";")[0].strip().lower()


def field_of(exchange: Exchange, name: str = MODEL_NAME) -> str | None:
    """A field of a form; None if there is no such field, or no form."""
    kind = media_type_of(exchange)
    if kind == "application/x-www-form-urlencoded":
        return dict(parse_qsl(bytes_of(exchange).decode("latin-1"))).get(name)
    return multipart_field(exchange, name) if kind == "multipart/form-data" else None


def multipart_field(exchange: Exchange, name: str) -> str | None:
    """A field of a multipart form; of one that cannot be read, what was read before the fault."""
    boundary = parse_options_header(exchange.header("content-type"))[1].get(b"boundary")
    if not boundary:
        return None
    found: dict[str, str] = {}

    def take(field: Any) -> None:
        found[(field.field_name or b"").decode("utf-8", "replace")] = (field.value or b"").decode("utf-8", "replace")

    content = bytes_of(exchange)
    config = {"MAX_MEMORY_FILE_SIZE": len(content) + 1, "MAX_BODY_SIZE": float("inf")}
    parser = FormParser("multipart/form-data", take, lambda file: None, boundary=boundary, config=config)
    try:
        parser.write(content)
        parser.finalize()
    except FormParserError:
        pass  # the worker will say what is wrong with it
    return found.get(name)


def read_lenient(raw: bytes) -> dict[str, Any]:
    """A JSON object, or nearly one: TorchServe took single quotes and bare words, so existing scripts have them."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        document = read_nearly_json(raw, error)
    if not isinstance(document, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(document).__name__}")
    return document


def read_nearly_json(raw: bytes, error: Exception) -> Any:
    """An object in YAML's flow style, which is JSON with fewer rules; its values are texts, and only texts."""
    import yaml

    if len(raw) <= NEARLY_JSON_BYTES and raw.lstrip().startswith(b"{"):
        try:
            document = yaml.load(raw, Loader=yaml.BaseLoader)
            return {str(key): value for key, value in document.items() if isinstance(value, str)}
        except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
            pass
    raise NotJson(f"the body is not JSON: {error}")
