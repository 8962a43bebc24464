"""Requests that run until the test releases them, so that it needs no fixed sleeps."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from support.running import Reply, RunningServer


class HeldRequests:
    """Requests to a model of `faulty.py`: those that its workers take run until `release`, the others wait."""

    def __init__(self, server: RunningServer, folder: Path, count: int = 1, *, model: str = "faulty") -> None:
        self.server = server
        self.gate = folder / "gate"
        self.notes = [folder / f"runs-{i}" for i in range(count)]
        orders = [{"do": "wait", "until": str(self.gate), "note": str(note)} for note in self.notes]
        self.futures: list[Future[Reply]] = server.at_once(lambda order: server.predict(model, order), orders)

    def wait_running(self, count: int = 1) -> HeldRequests:
        """Wait until `count` of them run."""
        self.server.until(lambda: sum(note.exists() for note in self.notes) == count)
        return self

    def release(self) -> list[Reply]:
        """End all of them and return the replies."""
        self.gate.touch()
        return [future.result() for future in self.futures]
