"""GrpcFrontend: opens the gRPC ports of a server, and drains them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from flambeau.config.server import Address, ServerConfig, Tls
from flambeau.errors import CannotListen, ConfigError
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc import health
from flambeau.frontend.grpc.inference import InferenceService
from flambeau.frontend.grpc.management import ManagementService
from flambeau.frontend.grpc.messages import POOL
from flambeau.frontend.grpc.open_inference import SERVICES, OpenInferenceService
from flambeau.frontend.grpc.service import GrpcService, Message, is_worth_logging
from flambeau.frontend.http.frontend import LAST_CALL_S, connections_per_grpc_port, flag_of, listen_error
from flambeau.frontend.tls import authorities
from flambeau.serving.server import Server
from flambeau.small_files import read_small

logger = logging.getLogger(__name__)

GRPC_LOGGER = "grpc._cython.cygrpc"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
MAX_REFLECTION_BYTES = 4096
KEEP_ALIVE_ANSWER_MS = 20_000
MAX_STREAMS = 1000  # concurrent calls of one connection; further ones wait


class GrpcFrontend:
    """Serves a Server over gRPC."""

    def __init__(self, server: Server, keys: Keys | None = None) -> None:
        self._server = server
        self._keys = keys
        self._ended = server.access_log.grpc if server.access_log else None
        self._ports: list[grpc.aio.Server] = []
        self._draining: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        server, config = self._server, self._server.config.grpc
        logging.getLogger(GRPC_LOGGER).addFilter(is_worth_logging)
        try:
            if config.inference is not None:
                services: list[GrpcService] = [InferenceService(server, self._keys)]
                if server.config.open_inference:
                    services += [OpenInferenceService(name, server, self._keys) for name in SERVICES]
                age = (config.inference_max_age_s, config.inference_max_age_grace_s)
                await self._listen(config.inference, services, lambda: server.is_ready, *age)
            if config.management is not None:
                age = (config.management_max_age_s, config.management_max_age_grace_s)
                await self._listen(config.management, [ManagementService(server, self._keys)], lambda: True, *age)
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
            await asyncio.wait([self._draining])

    def drain(self) -> None:
        """Accept no new calls; the accepted ones are answered within the drain timeout."""
        if self._draining is None:
            self._server.is_draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(LAST_CALL_S)
        await self._stop(self._server.config.drain_timeout_s)

    async def _stop(self, grace_s: float) -> None:
        await asyncio.gather(*(port.stop(grace_s) for port in self._ports))

    async def _listen(
        self,
        address: Address,
        services: Sequence[GrpcService],
        is_ready: Callable[[], bool],
        max_age_s: float | None,
        grace_s: float | None,
    ) -> None:
        config = self._server.config
        port = grpc.aio.server(options=options_for(config, max_age_s, grace_s))
        states = dict.fromkeys(["", *(service.name for service in services)], is_ready)
        health_service = health.HealthService(states, lambda: self._server.is_draining)
        describer = reflection_service([*(service.name for service in services), health.SERVICE, REFLECTION])
        for service in [*services, health_service, describer]:
            service.ended, service.tracing = self._ended, self._server.tracing
            port.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, service.handlers),))
        credentials = credentials_of(config.tls) if config.grpc.is_tls else None
        found = bind(port, address, credentials, flag_of(config, address))
        self._ports.append(port)
        await port.start()
        logger.info("gRPC: listening on %s", replace(address, port=found, is_tls=config.grpc.is_tls))


def reflection_service(names: Sequence[str]) -> GrpcService:
    """Describes these services and their messages to clients; it needs no key."""
    servicer = reflection.aio.ReflectionServicer(names, POOL)
    service = GrpcService(REFLECTION, max_bytes=MAX_REFLECTION_BYTES, read_timeout_s=health.READ_S)

    def answer(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        replies: AsyncIterator[Message] = servicer.ServerReflectionInfo(requests, None)
        return replies

    service.both("ServerReflectionInfo", reflection_pb2.ServerReflectionRequest, answer, idle_s=health.READ_S)
    return service


def options_for(config: ServerConfig, max_age_s: float | None, grace_s: float | None) -> list[tuple[str, Any]]:
    """The channel options of one port."""
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),  # otherwise a second server could silently share the port
        # Somewhat larger messages are received, so that the error can name the setting.
        ("grpc.max_receive_message_length", min(2 * config.max_request_bytes, 2**31 - 1)),
        ("grpc.server_handshake_timeout_ms", milliseconds(config.request_read_timeout_s)),
        ("grpc.max_connection_idle_ms", milliseconds(config.keep_alive_s)),
        # Pings detect clients that disappeared during a call.
        ("grpc.keepalive_time_ms", milliseconds(config.keep_alive_s)),
        ("grpc.keepalive_timeout_ms", KEEP_ALIVE_ANSWER_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", connections_per_grpc_port()),
        ("grpc.max_send_message_length", -1),  # workers limit each part to max_response_size
    ]
    if max_age_s is not None:
        options.append(("grpc.max_connection_age_ms", milliseconds(max_age_s)))
    if grace_s is not None:
        options.append(("grpc.max_connection_age_grace_ms", milliseconds(grace_s)))
    return options


def milliseconds(duration_s: float) -> int:
    """A duration for gRPC; the largest value means no limit."""
    return min(max(1, round(duration_s * 1000)), 2**31 - 1)


def bind(port: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None, flag: str) -> int:
    """Open a port; returns its number. Raises CannotListen with the reason."""
    if address.path is not None:
        target = f"unix:{address.path}"
    else:
        target = f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
    try:
        found = port.add_secure_port(target, credentials) if credentials else port.add_insecure_port(target)
    except RuntimeError:
        found = 0
    if not found:
        raise CannotListen(str(address), f"gRPC: {bind_error(address, flag, is_tls=credentials is not None)}")
    return found


def bind_error(address: Address, flag: str, *, is_tls: bool) -> str:
    """Why a port could not be opened. gRPC does not report it, so a plain socket is tried."""
    if address.path is not None:
        return f"{address} could not be opened"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        return listen_error(address, error, flag)
    hint = "; are certificate_file and private_key_file a certificate and its key, in PEM format?" if is_tls else ""
    return f"{address} could not be opened{hint}"


def credentials_of(tls: Tls) -> grpc.ServerCredentials:
    """The certificate and its key from PEM files; gRPC does not read key stores."""
    if tls.certificate_file is None or tls.private_key_file is None:
        raise ConfigError("gRPC over TLS needs certificate_file and private_key_file, both in PEM format")
    try:
        key, certificate = read_small(tls.private_key_file), read_small(tls.certificate_file)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    if tls.client_ca_file is None:
        return grpc.ssl_server_credentials([(key, certificate)])
    return grpc.ssl_server_credentials([(key, certificate)], authorities(tls.client_ca_file), require_client_auth=True)
