"""The few bodies that the server reads itself: forms and parameters. Workers read all others."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from io import SEEK_SET
from typing import Any
from urllib.parse import parse_qsl

from flambeau.errors import BadRequest, json_problem
from flambeau.frontend.http.exchange import Exchange

MODEL_NAME = "model_name"
MAX_FIELDS = 1000
PARAMETERS_BYTES = 64 * 1024  # of a body with the parameters of a call
NEARLY_JSON_BYTES = 16 * 1024  # YAML is read a hundred times slower than JSON
SLICE_BYTES = 64 * 1024  # of a form, parsed before other work gets a turn
READING_S = 2.0  # the time limit for reading a form
JSON_NOUNS: dict[type, str] = {
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def bytes_of(exchange: Exchange) -> bytes:
    """The body of a request; the exchange keeps it."""
    body = exchange.body
    if body is None:
        return b""
    return body.content if body.segment is None else bytes(body.segment.memory[: body.size_bytes])


def take_bytes(exchange: Exchange) -> bytes:
    """The body of a request; the exchange releases it."""
    content = bytes_of(exchange)
    exchange.take_body().release()
    return content


def media_type_of(exchange: Exchange) -> str:
    """The content type without its parameters."""
    return (exchange.header("content-type") or "").partition(";")[0].strip().lower()


def is_form(exchange: Exchange) -> bool:
    return media_type_of(exchange) in ("application/x-www-form-urlencoded", "multipart/form-data")


async def field_of(exchange: Exchange, name: str = MODEL_NAME) -> str | None:
    """A field of a form; None if it has no such field."""
    if media_type_of(exchange) == "multipart/form-data":
        return await multipart_field(exchange, name)
    return read_fields(bytes_of(exchange)).get(name)


def read_fields(raw: bytes) -> dict[str, str]:
    """The fields of an urlencoded form; of a repeated one, the last counts."""
    try:
        return dict(parse_qsl(raw.decode("latin-1"), max_num_fields=MAX_FIELDS))
    except ValueError:
        raise too_many_fields() from None


async def multipart_field(exchange: Exchange, name: str) -> str | None:
    """A field of a multipart form; a malformed form counts up to its first error."""
    from python_multipart import FormParser
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import parse_options_header

    boundary = parse_options_header(exchange.header("content-type"))[1].get(b"boundary")
    if not boundary:
        return None
    found: dict[str, str] = {}
    num_parts = 0

    def take(part: Any) -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts > MAX_FIELDS:
            raise too_many_fields()
        if hasattr(part, "value"):
            key = (part.field_name or b"").decode("utf-8", "replace")
            found[key] = (part.value or b"").decode("utf-8", "replace")

    content = bytes_of(exchange)
    config = {"MAX_MEMORY_FILE_SIZE": len(content) + 1, "MAX_BODY_SIZE": float("inf")}
    try:
        parser = FormParser("multipart/form-data", take, take, boundary=boundary, config=config)
    except FormParserError as error:
        raise BadRequest(f"the form could not be read: {error}") from None
    deadline = time.monotonic() + READING_S
    try:
        for start in range(0, len(content), SLICE_BYTES):
            parser.write(content[start : start + SLICE_BYTES])
            if name in found:
                break
            await asyncio.sleep(0)
            if time.monotonic() > deadline:
                raise BadRequest(f"the form could not be read within {READING_S:g} s; name the model in the query")
        else:
            parser.finalize()
    except FormParserError:
        pass  # the worker reports what is wrong with it
    return found.get(name)


@dataclass(frozen=True, slots=True)
class UploadForm:
    """A multipart form: the values of each field, and each file with its name."""

    fields: dict[str, list[str]]
    files: dict[str, tuple[str, bytes]]


def read_form(content_type: str, body: bytes) -> UploadForm:
    """A form with a file; blocks. Raises BadRequest for a body that is none."""
    from python_multipart import FormParser
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest("a file is sent as multipart/form-data; curl does so with -F file=@NAME -F FIELD=VALUE")
    form = UploadForm({}, {})

    def count() -> None:
        if len(form.files) + sum(map(len, form.fields.values())) >= MAX_FIELDS:
            raise too_many_fields()

    def on_field(field: Any) -> None:
        count()
        form.fields.setdefault(text_of(field.field_name), []).append(text_of(field.value))

    def on_file(file: Any) -> None:
        count()
        name = text_of(file.field_name)
        if name in form.files:
            raise BadRequest(f"the form has two files in the field {name[:100]!r}; send one")
        file.file_object.seek(0, SEEK_SET)
        form.files[name] = (text_of(file.file_name), file.file_object.read())

    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1, "MAX_BODY_SIZE": float("inf")}
    try:
        parser = FormParser("multipart/form-data", on_field, on_file, boundary=boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"the form could not be read: {error}") from None
    return form


def text_of(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def too_many_fields() -> BadRequest:
    return BadRequest(f"a form may have at most {MAX_FIELDS} fields")


def check_parameters(raw: bytes) -> None:
    """Reject a body that is too large to hold the parameters of a call."""
    if len(raw) > PARAMETERS_BYTES:
        raise BadRequest(f"the body has {len(raw)} bytes; parameters may have {PARAMETERS_BYTES}")


def read_lenient(raw: bytes) -> dict[str, Any]:
    """A JSON object; single quotes and bare words are accepted, since existing scripts have them."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        document = read_nearly_json(raw, error)
    if not isinstance(document, dict):
        raise BadRequest(f"the body must be a JSON object, not {JSON_NOUNS[type(document)]}")
    return document


def read_nearly_json(raw: bytes, error: Exception) -> Any:
    """An object in YAML's flow style, which is JSON with fewer rules; only its text values are kept."""
    import yaml

    if len(raw) <= NEARLY_JSON_BYTES and raw.lstrip().startswith(b"{"):
        try:
            document = yaml.load(raw, Loader=yaml.BaseLoader)
            return {str(key): value for key, value in document.items() if isinstance(value, str)}
        except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
            pass
    raise BadRequest(f"the body is not valid JSON: {json_problem(error)}")
