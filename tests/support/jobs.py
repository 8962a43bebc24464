"""Jobs without a client, and a worker without a process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from flambeau.errors import FlambeauError
from flambeau.metrics.traffic import HostTraffic, ModelTraffic
from flambeau.serving.events import ServerEvents
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.slow_requests import SlowRequests
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.messages import Load, Part, Ready, ToWorker


class Listener:
    """A receiver that keeps parts and errors."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.errors: list[FlambeauError] = []

    def on_parts(self, parts: list[Part]) -> None:
        self.parts += parts

    def on_error(self, error: FlambeauError) -> None:
        self.errors.append(error)


class BrokenListener(Listener):
    """Raises for parts, and for errors where `even_errors` is set."""

    def __init__(self, *, even_errors: bool = False) -> None:
        super().__init__()
        self._even_errors = even_errors

    def on_parts(self, parts: list[Part]) -> None:
        raise RuntimeError("parts are not accepted")

    def on_error(self, error: FlambeauError) -> None:
        super().on_error(error)
        if self._even_errors:
            raise RuntimeError("errors are not accepted")


def new_job(
    receiver: Any = None,
    *,
    headers: list[tuple[str, str]] | None = None,
    kind: Any = "predict",
    body: RequestBody | None = None,
) -> Job:
    return Job(
        Listener() if receiver is None else receiver,
        request_id="r",
        headers=headers or [],
        body=body or RequestBody(b""),
        arrived=0.0,
        kind=kind,
    )


class Channel:
    """Keeps the messages to the worker."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    send_soon = send

    def close(self) -> None:
        pass


def new_worker(
    *,
    on_free: Any = lambda: None,
    on_lost: Any = lambda *lost: None,
    events: ServerEvents | None = None,
    **ready: Any,
) -> RemoteWorker:
    """A worker that has loaded its model, as far as the server knows; needs a running event loop."""
    asyncio.get_running_loop()
    worker = RemoteWorker(
        WorkerSpec(id=1, load=Load("m", "1.0", "/", "h.py", 1, None, True, True, 1), environment={}, max_frame_bytes=1),
        on_free=on_free,
        on_lost=on_lost,
        on_samples=lambda samples: None,
        traffic=ModelTraffic("m", HostTraffic()),
        slow=SlowRequests(),
        output=SimpleNamespace(name="W-1-m_1.0"),  # type: ignore[arg-type]
        events=events or ServerEvents(),
        launcher=None,  # type: ignore[arg-type]
    )
    worker._channel = Channel()  # type: ignore[assignment]
    worker._receive([Ready(**ready)])
    return worker
