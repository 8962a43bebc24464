"""A real server process, and a plain client for it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from flambeau.http_client import HttpReply as Reply
from flambeau.testing.server import ModelServer, free_ports

__all__ = [
    "HANDLERS",
    "Load",
    "Reply",
    "RunningServer",
    "children_of",
    "free_ports",
    "is_running",
    "lines_with",
    "path",
]
HANDLERS = Path(__file__).parent / "handlers"
SITE = Path(__file__).parent / "site"


class RunningServer(ModelServer):
    """The server of the pytest plugin, with helpers for these tests."""

    start_timeout_s = 60.0  # a busy machine is no failure; what is there is found at once

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        variables = {"PYTHONPATH": path(), "FLAMBEAU_CRASH_FOLDER": str(log.parent / "crashes")}
        super().__init__(log, *arguments, env={**variables, **(env or {})})

    def predict(self, model: str, body: Any = b"", *, kind: str | None = None, **options: Any) -> Reply:
        return super().predict(model, body, content_type=kind, **options)

    def worker_pids(self, model: str) -> list[int]:
        return [worker["pid"] for worker in self.describe(model)["workers"] if worker["status"] == "READY"]

    def logged(self, *keys: str, level: str | None = None) -> list[str]:
        return lines_with(self.log, *keys, level=level)

    def failure(self, model: str) -> str:
        """Why a worker of the model has failed last; empty if none has."""
        failures = [worker.get("lastFailure") or {} for worker in self.describe(model)["workers"]]
        return next((failure["reason"] for failure in failures if failure), "")

    def at_once(self, call: Callable[..., Reply], bodies: list[Any]) -> list[Future[Reply]]:
        """Call with each body, concurrently."""
        pool = ThreadPoolExecutor(len(bodies))
        futures = [pool.submit(call, body) for body in bodies]
        pool.shutdown(wait=False)
        return futures


def lines_with(log: str, *keys: str, level: str | None = None) -> list[str]:
    """The lines of a level that contain all keys: names, numbers and settings, whatever words stand between them."""
    at_level = re.compile(
        rf"\S+ \[?{level[:4]}" if level else ""
    )  # `… WARNING …`, or `… [WARN ] …` in TorchServe's layout
    return [line for line in log.splitlines() if at_level.match(line) and all(key in line for key in keys)]


def children_of(pid: int) -> list[int]:
    """The running processes that a process has started, whichever of its threads did."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += map(int, file.read_text().split())
    return found


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has exited and was not reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def path() -> str:
    """The PYTHONPATH of the processes that tests start; see support/site."""
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
