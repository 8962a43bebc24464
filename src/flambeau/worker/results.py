"""The result of a handler → the bodies and parts of its replies."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from flambeau.wire.messages import Part
from flambeau.worker.context import Context, RequestProcessor
from flambeau.worker.result_mistakes import (
    NO_CHUNK,
    explain_count,
    explain_oddity,
    explain_type,
    explain_value,
    to_plain,
)

logger = logging.getLogger(__name__)

CHUNKS_OF_JSON = (
    "yields dicts, whose JSON is sent without anything between, so that a client cannot tell where one ends. "
    'Yield lines: json.dumps(item) + "\\n"; or events: "data: " + json.dumps(item) + "\\n\\n"'
)
STREAM_NEXT = "ts_stream_next"  # a header of streamed replies: whether another part follows

_encode_json = msgspec.json.Encoder(enc_hook=to_plain).encode
# msgspec differs from the standard library in non-ASCII and DEL, exponents and their threshold, and NaN and infinity,
# which it writes as null, or as "nan" and "inf" where they are keys.
_MAY_DIFFER = re.compile(rb"[\x7f-\xff]|\de|\b0\.0000|null|inf\"|nan\"")
_NOT_A_NUMBER = re.compile(rb"NaN|Infinity")  # perhaps in a text
_warned: set[str] = set()
MAX_WARNINGS = 50  # their texts may hold names that clients choose
_LINE_END = re.compile(r"[\r\n\0]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2


class BadResult(Exception):
    """A handler's result is no valid reply; the client gets the text, and the author the advice."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice  # without its subject: "returned dict of 2, expected …"
        self.place = ""  # the subject: `handle (handler.py:7)`


def to_body(value: Any) -> bytes | bytearray:
    """The bytes of one element of a handler's result."""
    if isinstance(value, (bytes, bytearray)):
        return value
    if isinstance(value, str):
        return value.encode("utf-8")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        warn_once("a Tensor in the result is sent as the bytes of torch.save. For JSON, return tensor.tolist()")
        return buffer.getvalue()
    return to_json(value)


def to_json(value: Any) -> bytes:
    """`json.dumps(value, indent=2)`, byte for byte; through a faster encoder where the result is the same.

    Arrays and tensors inside are lists of numbers.
    """
    try:
        text = msgspec.json.format(_encode_json(value), indent=2)
        if _MAY_DIFFER.search(text) is None:
            return text
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    try:
        text = json.dumps(value, indent=2, default=to_plain).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadResult("Unsupported model output data type.", explain_value(value, error)) from error
    if value is None or _NOT_A_NUMBER.search(text):
        warn_once(explain_oddity(value))
    return text


def warn_once(sentence: str) -> None:
    """Log what succeeds and is probably not meant; nothing for an empty sentence."""
    if sentence and sentence not in _warned and len(_warned) < MAX_WARNINGS:
        _warned.add(sentence)
        logger.warning("%s", sentence)


def check_size(body: bytes | bytearray, limit: int) -> None:
    """Raise BadResult for a body larger than the server accepts."""
    if len(body) > limit:
        raise BadResult(
            f"the response has {len(body)} bytes, max_response_size is {limit}: raise it, or send the reply in parts"
        )


def check_result(result: Any, count: int, verb: str = "returned") -> Sequence[Any]:
    """A handler's result, if it is a list with one element for each request; else raises BadResult."""
    if not isinstance(result, list):
        raise BadResult("Invalid model predict output", explain_type(result, count, verb))
    if len(result) != count:
        raise BadResult("number of batch response mismatched", explain_count(len(result), count, verb))
    if verb == "yielded":
        for chunk in result:
            check_chunk(chunk)
    return result


def check_chunk(chunk: Any) -> Any:
    """A yielded value; raises BadResult for None, which would be the text `null` in the middle of a stream."""
    if chunk is None:
        raise BadResult("Invalid model predict output", NO_CHUNK)
    return chunk


def stream_goes_on(context: Context, i: int, value: Any) -> bool | None:
    """Whether more follows, by the handler's stopping criteria; None: the result is no stream."""
    if not context.stopping_criteria:
        return None
    is_over = context.stopping_criteria[i](value)
    return None if is_over is None else not is_over


def to_parts(
    context: Context, values: Sequence[Any], limit: int, *, last: bool, indices: Sequence[int] | None = None
) -> list[Part]:
    """One part for each request of the batch, or for those at `indices`."""
    processors = context.touched_processors
    requests = context.requests
    parts = []
    for i, value in zip(range(len(requests)) if indices is None else indices, values, strict=True):
        body = to_body(value)
        if len(body) > limit:
            check_size(body, limit)
        parts.append(to_part(requests[i].job_id, body, processors[i] if processors else None, last=last))
    return parts


def to_part(job_id: int, body: bytes | bytearray, processor: RequestProcessor | None, *, last: bool) -> Part:
    """A part with the status and headers that the handler has set, if any."""
    if processor is None:
        return Part(job_id, body, last)  # type: ignore[arg-type]
    # Only the server sends the stream header.
    items = processor.get_response_headers().items()
    headers = [(str(key), str(value)) for key, value in items if key != STREAM_NEXT and is_header(str(key), str(value))]
    status, phrase = status_of(processor), processor.get_response_status_phrase()
    return Part(job_id, body, last, status, str(phrase or ""), headers or None)  # type: ignore[arg-type]


def status_of(processor: RequestProcessor) -> int:
    """The status a handler has set; those below 200 are informational and no response."""
    given = processor.get_response_status_code()
    try:
        status = int(given)
    except (TypeError, ValueError, OverflowError):
        status = 0
    if not 200 <= status <= 999:
        raise BadResult(f"the handler set the status {str(given)[:20]}; it must be a number from 200 to 999")
    return status


def is_header(name: str, value: str) -> bool:
    """Whether a header name is valid; an invalid one could end the head early or forge a length."""
    if not _TOKEN.fullmatch(name):
        warn_once(f"a header of the handler is left out: {name[:100]!r} is no valid name. Use letters, digits and '-'")
        return False
    if _LINE_END.search(value):
        warn_once(f"the header {name} of the handler has a line end in its value, which is sent as a space. Remove it")
    return True
