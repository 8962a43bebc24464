"""Frames of WebSockets (RFC 6455), without input and output: bytes ↔ messages, for the server and for clients."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NORMAL, GOING_AWAY, PROTOCOL_ERROR, NO_STATUS = 1000, 1001, 1002, 1005
INVALID_TEXT, TOO_BIG, INTERNAL_ERROR = 1007, 1009, 1011
MAX_CONTROL_BYTES = 125
MAX_REASON_BYTES = MAX_CONTROL_BYTES - 2
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CLOSE_CODES = frozenset((1000, 1001, 1002, 1003, *range(1007, 1015)))


class FrameError(Exception):
    """The peer does not keep to the protocol; `code` is the status to close with."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Frame(NamedTuple):
    """A whole message, or a control frame."""

    opcode: int
    payload: bytes


def accept_key(key: str) -> str:
    """The server's answer to the key of a handshake."""
    return base64.b64encode(hashlib.sha1(key.encode("latin-1") + _MAGIC).digest()).decode()


def is_key(key: str) -> bool:
    """Whether a handshake has a key of 16 bytes."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def new_key() -> str:
    return base64.b64encode(os.urandom(16)).decode()


def encode_frame(opcode: int, payload: bytes, *, is_masked: bool = False) -> bytes:
    """One frame with a whole message; clients mask theirs."""
    size, bit = len(payload), 0x80 if is_masked else 0
    first = 0x80 | opcode
    if size < 126:
        head = bytes((first, bit | size))
    elif size < 1 << 16:
        head = bytes((first, bit | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, bit | 127)) + size.to_bytes(8, "big")
    if not is_masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + masked(payload, mask)


def masked(payload: bytes, mask: bytes) -> bytes:
    """The payload with its mask applied, or removed."""
    size = len(payload)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(repeated, "little")).to_bytes(size, "little")


def close_payload(code: int, reason: str = "") -> bytes:
    """The payload of a close frame; a long reason is cut, not within a character."""
    text = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
    return code.to_bytes(2, "big") + text.encode()


def read_close(payload: bytes) -> tuple[int, str]:
    """The status and the reason of a close frame."""
    if not payload:
        return NO_STATUS, ""
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or not (code in _CLOSE_CODES or 3000 <= code < 5000):
        raise FrameError(PROTOCOL_ERROR, "the close frame has an invalid status")
    try:
        return code, payload[2:].decode()
    except UnicodeDecodeError:
        raise FrameError(INVALID_TEXT, "the reason of the close frame is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The first bytes of a frame."""

    is_final: bool
    opcode: int
    mask_start: int  # where the mask, or else the payload, begins
    size_bytes: int


class FrameReader:
    """Received bytes → messages and control frames. A message may come in fragments."""

    __slots__ = ("_buffer", "_fragments", "_fragments_bytes", "_is_masked", "_max_bytes", "_opcode")

    def __init__(self, *, max_bytes: int, is_masked: bool) -> None:
        self._max_bytes = max_bytes
        self._is_masked = is_masked
        self._buffer = bytearray()
        self._fragments: list[bytes] = []
        self._fragments_bytes = 0
        self._opcode = 0  # of the message whose fragments arrive

    @property
    def is_reading(self) -> bool:
        """Whether part of a message has arrived."""
        return bool(self._buffer or self._opcode)

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        self._buffer += data
        while (head := self._head()) is not None:
            start = head.mask_start + (4 if self._is_masked else 0)
            end = start + head.size_bytes
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[start:end])
            if self._is_masked:
                payload = masked(payload, bytes(self._buffer[head.mask_start : start]))
            del self._buffer[:end]
            if (frame := self._take(head, payload)) is not None:
                yield frame

    def _head(self) -> FrameHead | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        size, start = second & 0x7F, 2
        self._check(first, is_masked=bool(second & 0x80), size=size)
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:start], "big")
        if size + self._fragments_bytes > self._max_bytes and not first & 0x08:
            raise FrameError(TOO_BIG, f"the message is larger than {self._max_bytes} bytes (max_request_size)")
        return FrameHead(bool(first & 0x80), first & 0x0F, start, size)

    def _check(self, first: int, *, is_masked: bool, size: int) -> None:
        opcode = first & 0x0F
        if first & 0x70:
            raise FrameError(PROTOCOL_ERROR, "a frame uses an extension that was not agreed on")
        if opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise FrameError(PROTOCOL_ERROR, f"a frame has the unknown type {opcode}")
        if is_masked is not self._is_masked:
            raise FrameError(PROTOCOL_ERROR, "the frames of a client, and only those, must be masked")
        if opcode & 0x08 and (size > MAX_CONTROL_BYTES or not first & 0x80):
            raise FrameError(PROTOCOL_ERROR, "a control frame must be whole, with at most 125 bytes")
        if not opcode & 0x08 and (opcode == CONTINUATION) is not bool(self._opcode):
            raise FrameError(PROTOCOL_ERROR, "the fragments of a message must follow each other")

    def _take(self, head: FrameHead, payload: bytes) -> Frame | None:
        if head.opcode & 0x08:
            return Frame(head.opcode, payload)
        opcode = head.opcode or self._opcode
        if not head.is_final:
            self._opcode = opcode
            self._fragments.append(payload)
            self._fragments_bytes += len(payload)
            return None
        if self._fragments:
            payload = b"".join([*self._fragments, payload])
            self._fragments.clear()
        self._opcode = self._fragments_bytes = 0
        if opcode == TEXT:
            check_text(payload)
        return Frame(opcode, payload)


def check_text(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError:
        raise FrameError(INVALID_TEXT, "a text message is not UTF-8") from None
