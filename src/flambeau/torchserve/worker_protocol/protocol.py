"""TorchServe's worker protocol (OTF): its codec, for user code and for workers under TorchServe's own server.

Integers have 32 bits, big-endian; text is its length and UTF-8; -1 ends a list.

"""

from __future__ import annotations

import logging
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from flambeau.errors import HandlerError
from flambeau.torchserve.handlers.functions import deprecated
from flambeau.worker.context import Context
from flambeau.worker.inputs import media_type_of, parse_json
from flambeau.worker.results import STREAM_NEXT, BadResult, stream_goes_on, to_body

logger = logging.getLogger(__name__)

LOAD_MSG = b"L"
PREDICT_MSG = b"I"
END_OF_LIST = -1
_INT = struct.Struct("!i")

T = TypeVar("T")


class MessageSource(Protocol):
    """The socket method that reading needs."""

    def recv(self, size: int, /) -> bytes:
        """Up to `size` bytes; none after the peer has closed."""


# ---- reading ----


def retrieve_msg(conn: MessageSource) -> tuple[bytearray, Any]:
    """Read a message: its command, and a dict for a load or a list of requests for a prediction."""
    command = _read(conn, 1)
    if command == LOAD_MSG:
        return command, _read_load(conn)
    if command == PREDICT_MSG:
        return command, [*_read_list(conn, _read_request)]
    raise ValueError(f"Invalid command: {bytes(command)!r}")


def _read_load(conn: MessageSource) -> dict[str, Any]:
    message: dict[str, Any] = {
        "modelName": _read_text(conn),
        "modelPath": _read_text(conn),
        "batchSize": _read_int(conn),
        "handler": _read_text(conn),
    }
    if (gpu := _read_int(conn)) >= 0:
        message["gpu"] = gpu
    message["envelope"] = _read_text(conn)
    message["limitMaxImagePixels"] = bool(_read(conn, 1)[0])
    return message


def _read_request(conn: MessageSource, request_id: bytearray) -> dict[str, Any]:
    headers = [*_read_list(conn, lambda conn, name: {"name": name, "value": _read_text(conn)})]
    return {"requestId": request_id, "headers": headers, "parameters": [*_read_list(conn, _read_parameter)]}


def _read_parameter(conn: MessageSource, name: bytearray) -> dict[str, Any]:
    content_type = _read_text(conn).decode()
    return {"name": name.decode(), "contentType": content_type, "value": decode_value(_read_text(conn), content_type)}


def decode_value(raw: bytearray, content_type: str) -> Any:
    """Decode a value by its content type: JSON, text or bytes."""
    if os.environ.get("TS_DECODE_INPUT_REQUEST", "true") != "true":
        return raw
    media_type = media_type_of(content_type)
    try:
        if media_type == "application/json":
            return parse_json(raw)
        return raw.decode("utf-8") if media_type.startswith("text") else raw
    except (ValueError, RecursionError):
        logger.warning("a body sent as %s could not be decoded; the handler gets its bytes", media_type)
        return raw


def _read_list(conn: MessageSource, read_rest: Callable[[MessageSource, bytearray], T]) -> Iterator[T]:
    """The items of a list; each starts with a text."""
    while (size := _read_int(conn)) != END_OF_LIST:
        yield read_rest(conn, _read(conn, size))


def _read_text(conn: MessageSource) -> bytearray:
    return _read(conn, _read_int(conn))


def _read_int(conn: MessageSource) -> int:
    value: int = _INT.unpack(_read(conn, _INT.size))[0]
    return value


def _read(conn: MessageSource, size: int) -> bytearray:
    data = bytearray()
    while size > 0:
        try:
            packet = conn.recv(size)
        except ConnectionResetError:  # the peer closed with our last answer unread
            packet = b""
        if len(packet) == 0:
            logger.info("Frontend disconnected.")
            sys.exit(0)
        data += packet
        size -= len(packet)
    return data


# ---- writing ----


def create_load_model_response(code: int, message: str) -> bytearray:
    return bytearray(_INT.pack(code) + _text(message) + _INT.pack(END_OF_LIST))


def create_predict_response(
    ret: Sequence[Any] | None,
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context | None = None,
    ts_stream_next: bool = False,
) -> bytearray | None:
    """Encode one element per request; without a result, each is an error. None at rank > 0."""
    if not is_first_rank():
        return None
    response = bytearray(_INT.pack(code) + _text(message))
    try:
        for idx, request_id in req_id_map.items():
            body = b"error" if ret is None else to_body(ret[idx])
            if context is not None:
                _mark_stream(context, idx, None if ret is None else ret[idx], goes_on=ts_stream_next)
            response += _text(request_id) + _status(context, idx, code) + _INT.pack(len(body)) + body
    except BadResult as error:
        logger.warning("Unable to serialize model output.", exc_info=True)
        return create_predict_response(None, req_id_map, str(error), 503)
    return response + _INT.pack(END_OF_LIST)


def encode_response_headers(resp_hdr_map: Mapping[str, str]) -> bytearray:
    """The number of headers, then their names and values."""
    encoded = bytearray(_INT.pack(len(resp_hdr_map)))
    for name, value in resp_hdr_map.items():
        encoded += _text(name) + _text(value)
    return encoded


def is_first_rank() -> bool:
    """Whether this process is rank 0: only that one answers."""
    return os.environ.get("LOCAL_RANK", "0") in ("", "0")


def _mark_stream(context: Context, idx: int, value: Any, *, goes_on: bool) -> None:
    mark: bool | None = True if goes_on else stream_goes_on(context, idx, value)
    if mark is None and context.get_response_headers(idx).get(STREAM_NEXT) == "true" and not context.stopping_criteria:
        mark = False
    if mark is not None:
        context.set_response_header(idx, STREAM_NEXT, str(mark).lower())


def _status(context: Context | None, idx: int, code: int) -> bytes:
    if context is None:
        return _text("") + _INT.pack(code) + _text("") + _INT.pack(0)
    status, phrase = context.get_response_status(idx)
    headers = encode_response_headers(context.get_response_headers(idx))
    return _text(context.get_response_content_type(idx) or "") + _INT.pack(status) + _text(phrase or "") + headers


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _INT.pack(len(encoded)) + encoded


# ---- chunks ----


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: Mapping[int, str], message: str, code: int, context: Context | None = None
) -> None:
    """Send one chunk to each request that `req_id_map` names, before the handler returns. Only rank 0 sends.

    A socket that the caller put into the context receives the protocol's bytes.
    """
    if not is_first_rank():
        return
    if context is None or context.cl_socket is None:
        raise HandlerError("a chunk can be sent only while a request is handled, through its context")
    outlet: Any = context.cl_socket
    if not hasattr(outlet, "sendall"):
        context.send(ret, req_id_map)
    else:
        outlet.sendall(create_predict_response(ret, req_id_map, message, code, context, True))


deprecated_send_intermediate_predict_response = deprecated(
    version="1.0", replacement="ts.handler_utils.utils.send_intermediate_predict_response"
)(send_intermediate_predict_response)
