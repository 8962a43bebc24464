"""Bytes ↔ messages, without any I/O.

A frame is a little-endian 32-bit length and that many bytes of msgpack: a list of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from flambeau.wire.messages import ToServer, ToWorker

PREFIX = 4
ROOM = 256 * 1024  # bytes of a FrameBuffer; a longer frame gets a larger buffer until it is read

_encode = msgspec.msgpack.Encoder().encode
_decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
_decode_to_server = msgspec.msgpack.Decoder(list[ToServer]).decode


class BadFrame(Exception):
    """The peer sent an invalid frame."""


def to_frame(messages: Sequence[ToWorker | ToServer]) -> bytes:
    payload = _encode(messages)
    return len(payload).to_bytes(PREFIX, "little") + payload


def decode_to_worker(payload: memoryview) -> list[ToWorker]:
    """Raises BadFrame if the payload is invalid."""
    try:
        return _decode_to_worker(payload)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from None


def decode_to_server(payload: memoryview) -> list[ToServer]:
    """Raises BadFrame if the payload is invalid."""
    try:
        return _decode_to_server(payload)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from None


class FrameBuffer:
    """Collects received bytes and yields the payloads of whole frames.

    Receive into `space()`, then iterate over `filled(n)`. A payload is valid until the next call.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._view = memoryview(bytearray(ROOM))
        self._start = 0
        self._end = 0

    def space(self) -> memoryview:
        """Room for the next received bytes; never empty."""
        return self._view[self._end :]

    def filled(self, count: int) -> Iterator[memoryview]:
        """Add `count` received bytes; yield each whole payload."""
        self._end += count
        while (held := self._end - self._start) >= PREFIX:
            start = self._start + PREFIX
            size = int.from_bytes(self._view[self._start : start], "little")
            if size > self._max_frame_bytes:
                raise BadFrame(f"a frame of {size} bytes; at most {self._max_frame_bytes} are allowed")
            if held < PREFIX + size:
                self._make_room(PREFIX + size)
                return
            self._start = start + size
            yield self._view[start : self._start]
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) > ROOM:
                self._view = memoryview(bytearray(ROOM))
        else:
            self._make_room(PREFIX)

    def _make_room(self, needed: int) -> None:
        """Make a frame of `needed` bytes fit behind `_start`."""
        if len(self._view) - self._start >= needed and self._end < len(self._view):
            return
        held = self._view[self._start : self._end]
        if needed > len(self._view):
            self._view = memoryview(bytearray(needed))
        self._view[: len(held)] = held  # correct even where the two overlap
        self._start, self._end = 0, len(held)
