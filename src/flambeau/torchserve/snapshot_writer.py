"""SnapshotWriter: keeps LOG/config up to date with what is registered, off the event loop and in order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from flambeau.serving.server import Server
from flambeau.torchserve.snapshot import Kind, name_for, newest, to_documents, to_text

logger = logging.getLogger(__name__)


class SnapshotWriter:
    """Writes one file for the start, each change and the end."""

    def __init__(self, folder: Path, given: Mapping[str, str], server: Server) -> None:
        self._folder = folder
        self._given = given
        self._server = server
        self._last: str | None = None
        self._wishes: asyncio.Queue[tuple[Kind, Any] | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._write_all())

    def save(self, kind: Kind) -> None:
        """Take note of the models as they are now; they are written when their turn comes."""
        self._wishes.put_nowait((kind, to_documents(self._server.registry)))

    async def written(self) -> None:
        """Return when everything asked for so far is on the disk."""
        await self._wishes.join()

    async def close(self) -> None:
        """Return when everything is written."""
        self._wishes.put_nowait(None)
        await self._task

    async def _write_all(self) -> None:
        while (wish := await self._wishes.get()) is not None:
            kind, models = wish
            try:
                await asyncio.to_thread(self._write, kind, models)
            except OSError as error:
                logger.warning("no snapshot was written to %s: %s", self._folder, error.strerror or error)
            finally:
                self._wishes.task_done()

    def _write(self, kind: Kind, models: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._last is None and (there := newest(self._folder)):
            self._last = there.name
        now = datetime.now()
        name = name_for(kind, now, self._last)
        text = to_text(name, now, self._given, models, self._server.config.model_store)
        draft = self._folder / f".{name}.draft"
        # Only for this user: the settings may hold keystore_pass, which a start from the snapshot needs again.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="iso-8859-1") as file:
            file.write(text)
        os.replace(draft, self._folder / name)  # whoever reads it finds the whole of it
        self._last = name
