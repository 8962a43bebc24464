"""Frames of WebSockets (RFC 6455), without input and output: bytes ↔ messages, for the server and for clients."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from typing import NamedTuple

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NORMAL, GOING_AWAY, PROTOCOL_ERROR, NO_STATUS = 1000, 1001, 1002, 1005
INVALID_TEXT, POLICY, TOO_BIG, INTERNAL_ERROR, TRY_LATER = 1007, 1008, 1009, 1011, 1013
MAX_CONTROL_BYTES = 125
MAX_REASON_BYTES = MAX_CONTROL_BYTES - 2
PIECE_BYTES = 16 * 1024  # a larger frame is unmasked while it arrives
MAX_FRAGMENTS, FRAGMENT_BYTES = 10_000, 1024  # of a message: so many, and one more for each so many bytes
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


class FrameReader:
    """Received bytes → messages and control frames. A message may come in fragments."""

    __slots__ = (
        "_buffer",
        "_first",
        "_is_masked",
        "_mask",
        "_max_bytes",
        "_message",
        "_missing_bytes",
        "_num_fragments",
        "_opcode",
        "_start",
        "has_more",
        "num_finished",
    )

    def __init__(self, *, max_bytes: int, is_masked: bool) -> None:
        self._max_bytes = max_bytes
        self._is_masked = is_masked
        self._buffer = bytearray()
        self._start = 0  # of what is not read yet
        self._message = bytearray()  # the fragments that have arrived
        # Of a large frame that is arriving: its payload is unmasked piece by piece, since all at once takes long.
        self._missing_bytes, self._mask, self._first = 0, b"", 0
        self._num_fragments = 0
        self._opcode = 0  # of the message whose fragments arrive
        self.has_more = False  # a whole frame may have arrived that is not read yet
        self.num_finished = 0  # messages, and control frames outside of them

    @property
    def is_reading(self) -> bool:
        """Whether part of a message has arrived."""
        return bool(self._opcode or len(self._buffer) > self._start)

    @property
    def held_bytes(self) -> int:
        return len(self._buffer) + len(self._message)

    def clear(self) -> None:
        """Forget what has arrived; nothing can be read after that."""
        self._buffer, self._message = bytearray(), bytearray()
        self._start, self.has_more = 0, False

    def push(self, data: bytes | memoryview) -> None:
        """Keep received bytes; `frames` reads them."""
        self._buffer += data
        self.has_more = True

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        self.push(data)
        yield from self.frames(len(self._buffer))

    def frames(self, max_frames: int) -> Iterator[Frame]:
        """Read at most so many frames, fragments included. With `has_more`, others may follow."""
        buffer, is_masked = self._buffer, self._is_masked
        try:
            for _ in range(max_frames):
                at = self._start
                available = len(buffer) - at
                if self._missing_bytes and available >= min(4, self._missing_bytes):
                    if (frame := self._take_piece()) is not None:
                        self.num_finished += 1
                        yield frame
                    continue
                if available < 2 or self._missing_bytes:
                    self.has_more = False
                    return
                first, second = buffer[at], buffer[at + 1]
                size, head = second & 0x7F, 2
                if first & 0x78 or (first & 0x0F == 0) is not (self._opcode != 0) or first & 0x07 > BINARY:
                    self._check(first, size)
                if (second > 0x7F) is not is_masked:
                    raise FrameError(PROTOCOL_ERROR, "the frames of a client, and only those, must be masked")
                if size >= 126:
                    head = 4 if size == 126 else 10
                    if available < head:
                        self.has_more = False
                        return
                    size = int.from_bytes(buffer[at + 2 : at + head], "big")
                    if size < (126 if head == 4 else 1 << 16):
                        raise FrameError(PROTOCOL_ERROR, "the length of a frame is not in its shortest form")
                if size + len(self._message) > self._max_bytes and not first & 0x08:
                    raise FrameError(TOO_BIG, f"the message is larger than {self._max_bytes} bytes (max_request_size)")
                start = at + head + (4 if is_masked else 0)
                end = start + size
                if len(buffer) < end:
                    if size > PIECE_BYTES and len(buffer) >= start:
                        self._opcode = self._opcode or first & 0x0F
                        self._missing_bytes, self._mask, self._first = size, bytes(buffer[at + head : start]), first
                        self._start = start
                        continue
                    self.has_more = False
                    return
                payload = bytes(buffer[start:end]) if size else b""
                if is_masked and size:
                    payload = masked(payload, bytes(buffer[at + head : start]))
                self._start = end
                if first & 0x08:
                    self.num_finished += not self._opcode
                    yield Frame(first & 0x0F, payload)
                elif (frame := self._join(first, payload)) is not None:
                    self.num_finished += 1
                    yield frame
        finally:
            del buffer[: self._start]
            self._start = 0

    def _take_piece(self) -> Frame | None:
        """Read the next part of a large frame; the last one may end a message."""
        start, missing = self._start, self._missing_bytes
        size = min(len(self._buffer) - start, missing)
        if size < missing:
            size -= size % 4  # so that the mask fits the next piece
        piece = bytes(self._buffer[start : start + size])
        if self._is_masked:
            piece = masked(piece, self._mask)
        self._start += size
        self._missing_bytes -= size
        if not self._missing_bytes:
            return self._join(self._first, piece)
        self._message += piece
        return None

    def _check(self, first: int, size: int) -> None:
        opcode = first & 0x0F
        if first & 0x70:
            raise FrameError(PROTOCOL_ERROR, "a frame uses an extension that was not agreed on")
        if opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG):
            raise FrameError(PROTOCOL_ERROR, f"a frame has the unknown type {opcode}")
        if opcode & 0x08 and (size > MAX_CONTROL_BYTES or not first & 0x80):
            raise FrameError(PROTOCOL_ERROR, "a control frame must be whole, with at most 125 bytes")
        if not opcode & 0x08 and (opcode == CONTINUATION) is not bool(self._opcode):
            raise FrameError(PROTOCOL_ERROR, "the fragments of a message must follow each other")

    def _join(self, first: int, payload: bytes) -> Frame | None:
        """The message that a frame is, or is the last fragment of."""
        opcode = self._opcode or first & 0x0F
        if not first & 0x80:
            self._opcode = opcode
            self._message += payload
            self._num_fragments += 1
            if self._num_fragments > MAX_FRAGMENTS + len(self._message) // FRAGMENT_BYTES:
                raise FrameError(POLICY, "the fragments of the message are too many and too small; send larger ones")
            return None
        if self._opcode:
            self._message += payload
            payload = bytes(self._message)
            self._message = bytearray()
            self._opcode = self._num_fragments = 0
        if opcode == TEXT:
            check_text(payload)
        return Frame(opcode, payload)


def check_text(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError:
        raise FrameError(INVALID_TEXT, "a text message is not UTF-8") from None
