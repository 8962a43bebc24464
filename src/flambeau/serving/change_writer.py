"""ChangeWriter: writes what has changed, in order and off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

WRITE_S = 2.0  # how long a call waits for its change

Change = TypeVar("Change")


class ChangeWriter(Generic[Change]):
    """Calls `write` in a thread for each saved change; `path` is named where it cannot."""

    def __init__(self, write: Callable[[Change], None], path: Path) -> None:
        self._write = write
        self._path = path
        self._queue: asyncio.Queue[tuple[Change] | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._write_all())

    def save(self, change: Change) -> None:
        """Queue a change."""
        self._queue.put_nowait((change,))

    async def written(self) -> None:
        """Wait until all queued changes are on disk, but not for ever: a disk may hang."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITE_S):
                await self._queue.join()

    async def close(self) -> None:
        """Write the queued changes and stop."""
        self._queue.put_nowait(None)
        await self._task

    async def _write_all(self) -> None:
        while (entry := await self._queue.get()) is not None:
            try:
                await asyncio.to_thread(self._write, entry[0])
            except OSError as error:
                text = "the models could not be saved in %s: %s; the next start will not have the latest change"
                logger.warning(text, self._path, error.strerror or error)
            finally:
                self._queue.task_done()
