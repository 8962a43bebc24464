"""Jobs without a client, and a worker without a process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from flambeau.errors import FlambeauError
from flambeau.metrics.traffic import HostTraffic, ModelTraffic
from flambeau.serving.job import Body, Job
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.messages import Load, Part, Ready, ToWorker


class Listener:
    """Records the calls."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.errors: list[FlambeauError] = []

    def on_parts(self, parts: list[Part]) -> None:
        self.parts += parts

    def on_error(self, error: FlambeauError) -> None:
        self.errors.append(error)


class Clumsy(Listener):
    """Fails on every answer and, with `even_errors`, on errors."""

    def __init__(self, *, even_errors: bool = False) -> None:
        super().__init__()
        self._even_errors = even_errors

    def on_parts(self, parts: list[Part]) -> None:
        raise RuntimeError("no answer is welcome")

    def on_error(self, error: FlambeauError) -> None:
        super().on_error(error)
        if self._even_errors:
            raise RuntimeError("no error is welcome")


def new_job(receiver: Any = None, *, headers: list[tuple[str, str]] | None = None, kind: Any = "predict") -> Job:
    receiver = Listener() if receiver is None else receiver
    return Job(receiver, request_id="r", headers=headers or [], body=Body(b""), arrived=0.0, kind=kind)


class Channel:
    """Records the messages to the worker."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def new_worker(*, on_free: Any = lambda: None, on_lost: Any = lambda *lost: None, **ready: Any) -> RemoteWorker:
    """A worker that has loaded its model, as far as the server can tell; needs a running event loop."""
    asyncio.get_running_loop()
    worker = RemoteWorker(
        WorkerSpec(id=1, load=Load("m", "1.0", "/", "h.py", 1, None, True, True, 1), environment={}, max_frame_bytes=1),
        on_free=on_free,
        on_lost=on_lost,
        on_samples=lambda samples: None,
        traffic=ModelTraffic("m", HostTraffic()),
        output=SimpleNamespace(is_told=False),  # type: ignore[arg-type]
    )
    worker._channel = Channel()  # type: ignore[assignment]
    worker._receive([Ready(**ready)])
    return worker
