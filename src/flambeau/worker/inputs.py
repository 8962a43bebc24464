"""InputReader: a request → the row a handler gets, with one value for each parameter."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from flambeau.errors import BadRequest, json_problem
from flambeau.wire.messages import Request, Shared
from flambeau.wire.shared_memory import SegmentReader

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Form(Row):
    """The row of a form, with the content type of each field."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, str] = {}


def types_of(row: Row) -> dict[str, str] | None:
    """The content types of a form's fields; None for a plain body."""
    return row.types if type(row) is Form else None


MAX_FIELDS = 1000

_decode_json = msgspec.json.Decoder().decode


class InputReader:
    """Turns requests into rows, by the rules that existing handlers rely on."""

    def __init__(self, *, decode: bool, explains: bool = False) -> None:
        self._decode = decode
        self._explains = explains  # JSON of another content type is a problem
        self.segments = SegmentReader()

    def read(self, request: Request, *, warns: bool = True) -> Row:
        """The row of one request; raises BadRequest if its form is invalid. `warns`: log what cannot be decoded."""
        if request.kind == "describe":
            return {}
        body = request.body
        raw = self.segments.read(body) if type(body) is Shared else bytearray(body)  # type: ignore[arg-type]
        if request.kind in ("generate", "tokenize"):  # the front end has parsed the body already
            return {"body": raw}
        if request.fields is not None:
            return split(raw, request.fields)
        content_type = header(request, "content-type")
        media_type = media_type_of(content_type)
        if media_type == "multipart/form-data":
            row = self._read_form(raw, content_type, warns)
        elif media_type == "application/x-www-form-urlencoded":
            row = self._read_urlencoded(raw)
        else:
            row = {"body": self._value(raw, media_type, warns)}
        return self._with_query(row, request.query, content_type) if request.query else row

    def _value(self, raw: bytearray, media_type: str, warns: bool) -> Any:
        """JSON as objects, text as str; everything else, and invalid input, as bytearray (never bytes)."""
        if not self._decode:
            return raw
        try:
            return decode(raw, media_type)
        except (ValueError, RecursionError):
            if warns:
                logger.warning("a body sent as %s cannot be decoded; the handler gets its bytes", media_type)
        return raw

    def problem_of(self, request: Request, *, is_rejected: bool = False) -> str:
        """Why a value of a request could not be decoded, so that the handler got its bytes; empty if all could.

        `is_rejected`: the handler has parsed the body itself, and rejects it.
        """
        if not self._decode or request.kind in ("describe", "generate", "tokenize"):
            return ""
        row = self.read(request, warns=False)
        if self._explains and (problem := json_in_disguise(request, row, is_parsed=is_rejected)):
            return problem
        types = row.types if type(row) is Form else {"body": header(request, "content-type")}
        for name, content_type in types.items():
            value = row.get(name)
            media_type = media_type_of(content_type)
            if type(value) is not bytearray:
                continue
            try:
                decode(value, media_type)
            except (ValueError, RecursionError) as error:
                what = "valid JSON" if media_type == "application/json" else "UTF-8"
                return f"{name} was sent as {media_type}, but it is not {what}: {json_problem(error)}"
        return ""

    def _with_query(self, row: Row, query: str, content_type: str) -> Row:
        """The row with the parameters of the URL, as bytes; those of the body take precedence."""
        joined = self._read_urlencoded(bytearray(query, "latin-1"))
        joined.types |= row.types if type(row) is Form else {"body": content_type}
        joined.update(row)
        return joined

    def _read_urlencoded(self, raw: bytearray) -> Form:
        from urllib.parse import unquote_to_bytes

        row = Form()
        fields = bytes(raw).split(b"&", MAX_FIELDS)
        if len(fields) > MAX_FIELDS:
            raise BadRequest(f"a form may have at most {MAX_FIELDS} fields")
        for field in fields:
            name, _, value = field.partition(b"=")
            if name:
                key = unquote_to_bytes(name.replace(b"+", b" ")).decode("utf-8", "replace")
                row[key] = bytearray(unquote_to_bytes(value.replace(b"+", b" ")))
                row.types[key] = ""
        return row

    def _read_form(self, raw: bytearray, content_type: str, warns: bool) -> Row:
        from python_multipart import FormParser
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import parse_options_header

        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise BadRequest("multipart/form-data needs a boundary in its content type")
        row = Form()
        num_parts = 0

        def take(part: Any) -> None:
            nonlocal num_parts
            num_parts += 1
            if num_parts > MAX_FIELDS:
                raise BadRequest(f"a form may have at most {MAX_FIELDS} fields")
            name = (part.field_name or b"").decode("utf-8", "replace")
            if hasattr(part, "file_object"):
                part.file_object.seek(0)
                row.types[name] = part.content_type or "application/octet-stream"
                row[name] = self._value(bytearray(part.file_object.read()), media_type_of(row.types[name]), warns)
            else:
                row.types[name] = ""
                row[name] = bytearray(part.value or b"")

        config = {"MAX_MEMORY_FILE_SIZE": len(raw) + 1, "MAX_BODY_SIZE": float("inf")}
        try:
            parser = FormParser("multipart/form-data", take, take, boundary=boundary, config=config)
            parser.write(bytes(raw))
            parser.finalize()
        except FormParserError as error:
            raise BadRequest(f"the form could not be read: {error}") from None
        return row


def json_in_disguise(request: Request, row: Row, *, is_parsed: bool) -> str:
    """Why a body that looks like JSON did not arrive as JSON; empty if that is not the case."""
    if request.fields:  # over gRPC, which has no content types
        return ""
    media_type = media_type_of(header(request, "content-type"))
    if media_type == "application/x-www-form-urlencoded":
        start = next(iter(row), "")[:1].encode()
        sent = f"as {media_type}, the default of curl -d"
    else:
        body = row.get("body") if not is_parsed else None
        start = bytes(body[:1]) if type(body) is bytearray and media_type in ("", "application/octet-stream") else b""
        sent = f"as {media_type}" if media_type else "without a content type"
    if start not in (b"{", b"["):
        return ""
    return f"the body looks like JSON, but it was sent {sent}; add the header content-type: application/json"


def split(raw: bytearray, fields: Sequence[tuple[str, int]]) -> Row:
    """The row of a request whose body is several fields, one after another; they are bytes without a type."""
    row = Form()
    row.types = {name: "" for name, _ in fields}
    if len(fields) == 1:
        row[fields[0][0]] = raw
        return row
    start = 0
    for name, size in fields:
        row[name] = raw[start : start + size]
        start += size
    return row


def decode(raw: bytearray, media_type: str) -> Any:
    """JSON as objects, text as str, everything else unchanged; raises ValueError or RecursionError."""
    if media_type == "application/json":
        return parse_json(raw)
    return raw.decode("utf-8") if media_type.startswith("text") else raw


def parse_json(raw: bytearray) -> Any:
    """`json.loads`, through a faster decoder where the result is the same."""
    try:
        return _decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return json.loads(raw)  # NaN, Infinity, other encodings


def header(request: Request, name: str) -> str:
    """A header of a request, without regard to case; the last one wins."""
    size = len(name)
    found = ""
    for key, value in request.headers:
        if len(key) == size and key.lower() == name:
            found = value
    return found


def media_type_of(content_type: str) -> str:
    """A content type without its parameters."""
    return content_type.partition(";")[0].strip()


def read_headers(request: Request, types: dict[str, str] | None) -> dict[str, Any]:
    """The headers a handler sees: the client's, the kind of call, and the content type of each parameter."""
    headers: dict[str, Any] = dict(request.headers)
    if request.kind == "describe":
        headers["describe"] = "True"
    else:
        if request.fields is None:  # calls without a URL, such as gRPC, lack these headers
            headers["url_path"] = request.url_path
            headers["explain"] = str(request.kind == "explain")
        types = types if types is not None else {"body": header(request, "content-type")}
        headers |= {name: {"content-type": kind} for name, kind in types.items()}
    return headers
