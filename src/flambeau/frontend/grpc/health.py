"""HealthService: grpc.health.v1 for load balancers and probes; it needs no key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from flambeau.errors import ModelNotFound
from flambeau.frontend.grpc.service import GrpcService, Message

SERVICE = "grpc.health.v1.Health"
LOOK_EVERY_S = 0.25
MAX_BYTES = 4096
READ_S = 5.0  # calls without a key get little time

_Response = health_pb2.HealthCheckResponse
UNKNOWN: int = _Response.SERVICE_UNKNOWN
SERVING: int = _Response.SERVING
NOT_SERVING: int = _Response.NOT_SERVING


class HealthService(GrpcService):
    """Health of the services of one port, by name; "" is the port. One task checks it for all watchers."""

    def __init__(self, states: Mapping[str, Callable[[], bool]], is_draining: Callable[[], bool]) -> None:
        super().__init__(SERVICE, max_bytes=MAX_BYTES, read_timeout_s=READ_S)
        self._states = states
        self._is_draining = is_draining
        self._seen = self._look()
        self._changed = asyncio.Event()  # replaced after each change
        self._num_watching = 0
        self._looking: asyncio.Task[None] | None = None  # while there are watchers
        self.one("Check", health_pb2.HealthCheckRequest, self.check)
        self.many("Watch", health_pb2.HealthCheckRequest, self.watch)

    async def check(self, request: Message) -> Message:
        status = self._look()[0].get(request.service)
        if status is None:
            raise ModelNotFound(f"There is no service {request.service!r} at this port.")
        return _Response(status=status)

    async def watch(self, request: Message) -> AsyncIterator[Message]:
        """The current status and each change; the stream ends when the server stops."""
        sent = None
        self._start_watching()
        try:
            while True:
                changed, (statuses, ends) = self._changed, self._seen
                status = statuses.get(request.service, UNKNOWN)
                if status != sent:
                    sent = status
                    yield _Response(status=status)
                if ends:
                    return
                await changed.wait()
        finally:
            self._stop_watching()

    def _start_watching(self) -> None:
        self._num_watching += 1
        if self._looking is None:
            self._seen = self._look()
            self._looking = asyncio.get_running_loop().create_task(self._keep_looking())

    def _stop_watching(self) -> None:
        self._num_watching -= 1
        if not self._num_watching and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (now := self._look()) != self._seen:
                self._seen = now
                self._changed.set()
                self._changed = asyncio.Event()

    def _look(self) -> tuple[dict[str, int], bool]:
        """The status of each service, and whether the server is stopping."""
        ends = self._is_draining()
        known = {is_up: is_up() and not ends for is_up in {*self._states.values()}}
        return {name: SERVING if known[is_up] else NOT_SERVING for name, is_up in self._states.items()}, ends
