"""Answer: a job's whole reply, to be awaited."""

from __future__ import annotations

import asyncio

from flambeau.errors import FlambeauError
from flambeau.wire.messages import Part


class Answer:
    """Collects a job's whole reply."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []

    def on_parts(self, parts: list[Part]) -> None:
        """Take parts."""
        self._parts += [part.body for part in parts]
        if parts[-1].last and not self.done.done():
            self.done.set_result(b"".join(self._parts))

    def on_error(self, error: FlambeauError) -> None:
        """Take an error."""
        if not self.done.done():
            self.done.set_exception(error)
