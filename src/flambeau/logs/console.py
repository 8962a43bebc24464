"""Console: the terminal, pipe or file that lines are shown on. One that accepts nothing does not block the logs."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable

PATIENCE_S = 0.5  # how long a console may block before lines are dropped
PIPE_BYTES = 4096  # a pipe that is ready accepts this much without blocking
CLEAR = b"\r\x1b[K"  # what a spinner has left in the line that is written next
FILE_BYTES = 1 << 20  # a file accepts everything; each write hands the interpreter to another thread


class Console:
    """Writes whole lines to a descriptor. Lines that it does not accept are dropped and counted.

    `to_note` makes a line from the number of dropped lines; it is written when the console accepts lines again.
    """

    def __init__(self, descriptor: int, to_note: Callable[[int], bytes] | None = None) -> None:
        self.num_lost = 0  # lines, since the last note
        self._to_note = to_note
        self._descriptor = descriptor
        self._is_blocked = False
        self._rest = b""  # of a line that was accepted in part
        self._room = room_of(descriptor)
        self._clear = CLEAR if is_terminal(descriptor) else b""

    @property
    def accepts_at_once(self) -> bool:
        """Whether PIPE_BYTES can be written now without blocking; a closed console accepts everything."""
        return not self.num_lost and not self._rest and self._is_ready(0.0)

    def write(self, data: bytes) -> None:
        """Write lines. A slow reader is waited for; one that has stopped only once, until it reads again."""
        if self.num_lost and self._to_note is not None:
            lost, self.num_lost = self.num_lost, 0
            if self._send(self._to_note(lost)):
                self.num_lost = lost
        if self._clear and data and not self._rest:
            data = self._clear + data
        self.num_lost += self._send(data)

    def _send(self, data: bytes) -> int:
        """Write what is accepted; return the number of lines that are not."""
        is_inside = bool(self._rest)  # of a line
        data, self._rest = self._rest + data, b""
        if not data:
            return 0
        sent = 0
        try:
            while sent < len(data) and self._is_ready(0.0 if self._is_blocked else PATIENCE_S):
                sent += os.write(self._descriptor, data[sent : sent + self._room])
        except OSError:
            pass  # a closed terminal, a full disk
        else:
            self._is_blocked = sent < len(data)
        if sent == len(data):
            return 0
        if sent:
            is_inside = data[sent - 1 : sent] != b"\n"
        end = data.find(b"\n", sent) + 1 if is_inside else sent
        self._rest = data[sent:end]
        return data.count(b"\n", end)

    def _is_ready(self, timeout_s: float) -> bool:
        poller = select.poll()
        try:
            poller.register(self._descriptor, select.POLLOUT)
            return bool(poller.poll(timeout_s * 1000))
        except OSError:
            return True  # the write reports it


def room_of(descriptor: int) -> int:
    """How many bytes can be written at once without blocking, when the descriptor is ready."""
    try:
        return FILE_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else PIPE_BYTES
    except OSError:  # a closed console; the write reports it
        return PIPE_BYTES


def is_terminal(descriptor: int) -> bool:
    """Whether it is a terminal that knows control sequences."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"
