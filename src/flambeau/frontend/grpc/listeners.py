"""GrpcFrontend: the gRPC ports of a server, opened together and drained together."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_reflection.v1alpha import _async as reflection
from grpc_reflection.v1alpha import reflection_pb2_grpc

from flambeau.config.server import Address, ServerConfig
from flambeau.errors import ConfigError
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc.calls import Service
from flambeau.frontend.grpc.health import SERVICE as HEALTH
from flambeau.frontend.grpc.health import health_service
from flambeau.frontend.grpc.inference import inference_service
from flambeau.frontend.grpc.management import management_service
from flambeau.frontend.grpc.messages import POOL
from flambeau.frontend.grpc.open_inference import open_inference_services
from flambeau.frontend.http.listeners import LAST_CALL_S, why_not
from flambeau.serving.server import Server

REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


class GrpcFrontend:
    """Serves a Server over gRPC."""

    def __init__(self, server: Server, keys: Keys | None) -> None:
        self._server = server
        self._keys = keys
        self._ports: list[grpc.aio.Server] = []
        self._draining: asyncio.Task[None] | None = None
        self.addresses: list[Address] = []  # with the ports that were found, if any were asked for

    async def __aenter__(self) -> Self:
        server, config = self._server, self._server.config.grpc
        try:
            if config.inference is not None:
                services = [inference_service(server, self._keys), *open_inference_services(server, self._keys)]
                age = (config.inference_max_age_s, config.inference_max_age_grace_s)
                await self._listen(config.inference, services, lambda: server.is_ready, age)
            if config.management is not None:
                age = (config.management_max_age_s, config.management_max_age_grace_s)
                await self._listen(config.management, [management_service(server, self._keys)], lambda: True, age)
        except BaseException:
            await self._stop(0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._stop(0)
        else:
            self.drain()
        if self._draining is not None:
            await self._draining

    def drain(self) -> None:
        """Take no new calls from now on; those that were accepted are answered, within the drain time-out."""
        if self._draining is None:
            self._server.is_draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(LAST_CALL_S)
        await self._stop(self._server.config.drain_timeout_s)

    async def _stop(self, grace_s: float) -> None:
        await asyncio.gather(*(port.stop(grace_s) for port in self._ports))
...
