"""A worker without a process: the same loading, reading and replying, for `flambeau run` and for tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flambeau.wire.messages import Load, Request
from flambeau.worker.context import Context
from flambeau.worker.inputs import InputReader, read_headers, types_of
from flambeau.worker.loader import load_handler
from flambeau.worker.loop import new_context
from flambeau.worker.replies import check_result, to_body


class InProcess:
    """Holds a handler and calls it directly: breakpoints work, exceptions come through."""

    def __init__(self, load: Load) -> None:
        self.context: Context = new_context(load)
        self._reader = InputReader(decode=load.decode_input)
        self._replies: list[bytes] = []
        self.context.connect(self, read_headers)
        self._loop = asyncio.new_event_loop()
        self._entry = load_handler(load.handler, Path(load.folder), self.context, self._loop)

    def handle(self, requests: Sequence[Request]) -> list[bytes]:
        """Run one batch; streamed replies are joined."""
        self._replies = [b""] * len(requests)
        rows = [self._reader.read(request) for request in requests]
        self.context.begin(requests, [types_of(row) for row in rows])
        result: Any = self._entry.handle(rows, self.context)
        if inspect.isawaitable(result) or inspect.isasyncgen(result):
            self._loop.run_until_complete(self._finish_async(result))
        elif inspect.isgenerator(result):
            for item in result:
                self._add(item if isinstance(item, list) else [item])
        else:
            self._add(check_result(result, len(requests)))
        return self._replies

    async def _finish_async(self, result: Any) -> None:
        if inspect.isasyncgen(result):
            async for item in result:
                self._add(item if isinstance(item, list) else [item])
        else:
            self._add(check_result(await result, len(self._replies)))

    def _add(self, values: Sequence[Any]) -> None:
        for i, value in enumerate(check_result(values, len(self._replies))):
            chunks = value if inspect.isgenerator(value) else [value]
            self._replies[i] += b"".join(bytes(to_body(chunk)) for chunk in chunks)

    def close(self) -> None:
        """Let go of the event loop."""
        self._loop.close()

    def send_values(self, context: Context, values: Sequence[Any]) -> None:
        """A chunk for each request."""
        self._add(values)

    def is_cancelled(self, job_id: int) -> bool:
        """Nobody goes away from a direct call."""
        return False
