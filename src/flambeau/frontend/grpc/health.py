"""grpc.health.v1: whether the server can answer, for load balancers and probes; open to everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from flambeau.errors import ModelNotFound
from flambeau.frontend.grpc.calls import Message, Service

SERVICE = "grpc.health.v1.Health"
LOOK_EVERY_S = 0.25
MAX_BYTES = 4096
READ_S = 5.0  # nobody is asked for a key here, and the message is a name

_Response = health_pb2.HealthCheckResponse
UNKNOWN: int = _Response.SERVICE_UNKNOWN
SERVING: int = _Response.SERVING
NOT_SERVING: int = _Response.NOT_SERVING


def health_service(states: Mapping[str, Callable[[], bool]], is_draining: Callable[[], bool]) -> Service:
    """Health of the services of one port; the empty name stands for the port as a whole."""
    health = Health(states, is_draining)
    service = Service(SERVICE, max_bytes=MAX_BYTES, read_timeout_s=READ_S)
    service.one("Check", health_pb2.HealthCheckRequest, health.check)
    service.many("Watch", health_pb2.HealthCheckRequest, health.watch)
    return service


class Health:
    """Tells the health of services, and all who watch it when it changes: one looks for all of them."""

    def __init__(self, states: Mapping[str, Callable[[], bool]], is_draining: Callable[[], bool]) -> None:
        self._states = states
        self._is_draining = is_draining
        self._seen = self._look()
        self._changed = asyncio.Event()  # another one after each change
        self._num_watching = 0
        self._looking: asyncio.Task[None] | None = None  # while somebody watches

    async def check(self, request: Message) -> Message:
        """The status of a service now."""
        status = self._look()[0].get(request.service)
        if status is None:
            raise ModelNotFound(f"There is no service {request.service!r} at this port.")
        return _Response(status=status)

    async def watch(self, request: Message) -> AsyncIterator[Message]:
        """Tell the status now and whenever it changes; ends when the server stops, so that nobody waits for it."""
        told = None
        self._begin()
        try:
            while True:
                changed, (statuses, ends) = self._changed, self._seen
                status = statuses.get(request.service, UNKNOWN)
                if status != told:
                    told = status
                    yield _Response(status=status)
                if ends:
                    return
                await changed.wait()
        finally:
            self._end()

    def _begin(self) -> None:
        self._num_watching += 1
        if self._looking is None:
            self._seen = self._look()
            self._looking = asyncio.get_running_loop().create_task(self._keep_looking())

    def _end(self) -> None:
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
        """The status of each service, and whether the server stops."""
        ends = self._is_draining()
        known = {is_up: is_up() and not ends for is_up in {*self._states.values()}}
        return {name: SERVING if known[is_up] else NOT_SERVING for name, is_up in self._states.items()}, ends
