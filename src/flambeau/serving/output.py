"""What workers print: passed on to the model log, with the last lines kept as evidence."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from pathlib import Path

KEPT_LINES = 30
KEPT_LINE_BYTES = 500
CHUNK_BYTES = 64 * 1024


class Tail:
    """The last lines a worker wrote."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    def add(self, lines: list[bytes]) -> None:
        """Take note of whole lines."""
        self._lines.extend(line[:KEPT_LINE_BYTES] for line in lines[-KEPT_LINES:])

    def lines(self) -> tuple[str, ...]:
        """The last lines as text, without the empty ones."""
        return tuple(line.decode("utf-8", "replace") for line in self._lines if line.strip())


async def forward(stream: asyncio.StreamReader, name: str, tail: Tail) -> None:
    """Copy a worker's output to our stderr, each line under the worker's name.

    Whole chunks are handled at once, so a handler that prints megabytes costs the server little.
    """
    prefix = f"{name} ".encode()
    rest = b""
    while chunk := await stream.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > CHUNK_BYTES:  # a line without an end
            lines, rest = [*lines, rest], b""
        if lines:
            write(b"".join([prefix + line + b"\n" for line in lines]))
            tail.add(lines)
    if rest:
        write(prefix + rest + b"\n")
        tail.add([rest])


def write(text: bytes) -> None:
    """Write to stderr; a closed terminal is no reason to fail."""
    try:
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        pass


def count_kernel_kills() -> int:
    """How many processes the kernel has killed for want of memory, so far: in our control group, or at all."""
    for source in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(source).read_text().splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0
