"""A real server process, and a plain client for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flambeau.http_client import HttpReply as Reply
from flambeau.testing.ports import free_ports
from flambeau.testing.server import ModelServer

__all__ = ["HANDLERS", "Load", "Reply", "RunningServer", "free_ports", "path"]
HANDLERS = Path(__file__).parent / "handlers"
SITE = Path(__file__).parent / "site"


class RunningServer(ModelServer):
    """The server that users test with, and what only our own tests ask of it."""

    start_timeout_s = 60.0  # a busy machine is no failure; what is there is found at once

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(log, *arguments, env={"PYTHONPATH": path(), **(env or {})})

    def predict(self, model: str, body: Any = b"", *, kind: str | None = None, **options: Any) -> Reply:
        return super().predict(model, body, content_type=kind, **options)

    def worker_pids(self, model: str) -> list[int]:
        return [worker["pid"] for worker in self.describe(model)["workers"] if worker["status"] == "READY"]

    def at_once(self, call: Callable[..., Reply], bodies: list[Any]) -> list[Future[Reply]]:
        """Call with each body, all at a time."""
        pool = ThreadPoolExecutor(len(bodies))
        futures = [pool.submit(call, body) for body in bodies]
        pool.shutdown(wait=False)
        return futures


def path() -> str:
    """What the processes that tests start find modules on: see support/site."""
    return os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])


class Load:
    """Steady traffic from threads, with every answer kept."""

    def __init__(self, call: Callable[[], Reply], threads: int) -> None:
        self.replies: list[Reply] = []
        self.errors: list[Exception] = []
        self._call = call
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.replies.append(self._call())
            except Exception as error:
                self.errors.append(error)
