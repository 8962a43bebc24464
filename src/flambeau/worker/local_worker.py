"""LocalWorker: runs a handler in this process, for `flambeau run` and `flambeau check`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flambeau.wire.messages import Load, Request
from flambeau.worker.blocking_calls import BlockingCallMonitor
from flambeau.worker.code_places import place_of
from flambeau.worker.context import Context
from flambeau.worker.inputs import InputReader, Row, read_headers, types_of
from flambeau.worker.loader import in_envelope, load_handler
from flambeau.worker.model import new_context
from flambeau.worker.results import CHUNKS_OF_JSON, BadResult, check_chunk, check_result, to_body, to_part, warn_once
from flambeau.worker.stage_timings import StageObserver


class LocalWorker:
    """Loads and calls a handler as a worker does, but directly: breakpoints work and exceptions pass through."""

    def __init__(self, load: Load, observer: StageObserver | None = None, *, blocking_s: float | None = None) -> None:
        """With `blocking_s` it warns of calls that block the event loop of an `async def` handler for so long."""
        self.context: Context = new_context(load)
        self._reader = InputReader(decode=load.decode_input)
        self._replies: list[bytes] = []
        self.context.connect(self, read_headers)
        self._loop = asyncio.new_event_loop()
        self._observer = observer or StageObserver()
        self.largest_part_bytes = 0
        try:
            loaded = load_handler(load.handler, Path(load.folder), self.context, self._loop)
            self.loaded = in_envelope(loaded, load.envelope, Path(load.folder))
        except BaseException:
            self._loop.close()
            raise
        self._handle = self._observer.observe(self.loaded).handle if observer else self.loaded.handle
        self._running: list[Any] = []
        self._monitor: BlockingCallMonitor | None = None
        if blocking_s is not None and self.loaded.is_concurrent:
            self._monitor = BlockingCallMonitor(self._loop, self._running, blocking_s)
            self._monitor.start()

    def handle(self, requests: Sequence[Request]) -> list[bytes]:
        """Run one batch; the chunks of a streamed reply are joined."""
        self._replies = [b""] * len(requests)
        rows = [self._reader.read(request) for request in requests]
        self.context.begin(requests, [types_of(row) for row in rows])
        self._observer.begin()
        try:
            self._call(rows)
            for processor in self.context.touched_processors or ():
                to_part(0, b"", processor, last=True)  # checks the status and the headers that the handler has set
        except BadResult as error:
            error.place = error.place or place_of(self.loaded.handle)
            raise
        self.context.take_samples()  # they are reported nowhere, and must not pile up
        return self._replies

    def _call(self, rows: list[Row]) -> None:
        result: Any = self._handle(rows, self.context)
        if self.loaded.is_concurrent and (inspect.isawaitable(result) or inspect.isasyncgen(result)):
            self._loop.run_until_complete(self._watch(result))
        elif inspect.isgenerator(result):
            for item in result:
                self._add_chunk(item)
        else:
            self._add(check_result(result, len(rows)))

    async def _watch(self, result: Any) -> None:
        if self._monitor is None:
            return await self._finish_async(result)
        self._running.append(result)
        self._monitor.on_job()
        try:
            await self._finish_async(result)
        finally:
            self._running.clear()

    async def _finish_async(self, result: Any) -> None:
        if inspect.isasyncgen(result):
            async for item in result:
                self._add_chunk(item)
        else:
            self._add(check_result(await result, len(self._replies)))

    def _add_chunk(self, item: Any) -> None:
        if type(item) is dict and any(self._replies):
            warn_once(f"{place_of(self.loaded.handle)} {CHUNKS_OF_JSON}")
        self._add(item if isinstance(item, list) else [item], verb="yielded")

    def _add(self, values: Sequence[Any], indices: Sequence[int] | None = None, verb: str = "sent") -> None:
        chosen = range(len(self._replies)) if indices is None else indices
        for i, value in zip(chosen, check_result(values, len(chosen), verb), strict=True):
            chunks = map(check_chunk, value) if inspect.isgenerator(value) else [value]
            for body in map(to_body, chunks):
                self.largest_part_bytes = max(self.largest_part_bytes, len(body))
                self._replies[i] += body

    def close(self) -> None:
        self._loop.close()

    def send_values(self, context: Context, values: Sequence[Any], indices: Sequence[int] | None = None) -> None:
        self._add(values, indices)

    def is_cancelled(self, job_id: int) -> bool:
        return False
