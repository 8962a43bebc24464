"""Requests that run until the test releases them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from support.running import Reply, RunningServer


class Held:
    """Requests to a model of `faulty.py`, of which the first ones run and the others wait until `release`."""

    def __init__(self, server: RunningServer, folder: Path, count: int = 1, *, model: str = "faulty") -> None:
        self.server = server
        self.gate = folder / "gate"
        self.notes = [folder / f"runs-{i}" for i in range(count)]
        orders = [{"do": "wait", "until": str(self.gate), "note": str(note)} for note in self.notes]
        self.futures: list[Future[Reply]] = server.at_once(lambda order: server.predict(model, order), orders)

    def wait_running(self, count: int = 1) -> Held:
        """Wait until so many of them run."""
        self.server.until(lambda: sum(note.exists() for note in self.notes) == count)
        return self

    def release(self) -> list[Reply]:
        """Let them go, and return the answers."""
        self.gate.touch()
        return [future.result() for future in self.futures]
