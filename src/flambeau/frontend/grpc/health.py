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

_Response = health_pb2.HealthCheckResponse
UNKNOWN: int = _Response.SERVICE_UNKNOWN
SERVING: int = _Response.SERVING
NOT_SERVING: int = _Response.NOT_SERVING


def health_service(states: Mapping[str, Callable[[], bool]], is_draining: Callable[[], bool]) -> Service:
    """Health of the services of one port; the empty name stands for the port as a whole."""

    def status_of(name: str) -> int:
        if name not in states:
            return UNKNOWN
        return SERVING if states[name]() and not is_draining() else NOT_SERVING

    async def check(request: Message) -> Message:
        if request.service not in states:
            raise ModelNotFound(f"There is no service {request.service!r} at this port.")
        return _Response(status=status_of(request.service))

    async def watch(request: Message) -> AsyncIterator[Message]:
        """Tell the status now and whenever it changes; ends when the server stops, so that nobody waits for it."""
        told = None
        while True:
            ends, status = is_draining(), status_of(request.service)
            if status != told:
                told = status
                yield _Response(status=status)
            if ends:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    service = Service(SERVICE, max_bytes=MAX_BYTES)
    service.one("Check", health_pb2.HealthCheckRequest, check)
    service.many("Watch", health_pb2.HealthCheckRequest, watch)
    return service
