"""The life cycle of a server process: open the ports, serve until a signal, drain, close."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from flambeau.config.server import Address, ServerConfig, check_protection
from flambeau.errors import ConfigError
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.frontend import HttpFrontend
from flambeau.frontend.routes import routes_by_address
from flambeau.logs.setup import open_logs
from flambeau.logs.writer import Logs
from flambeau.serving.events import ServerEvents
from flambeau.serving.server import Server

if TYPE_CHECKING:
    from flambeau.frontend.grpc.frontend import GrpcFrontend

logger = logging.getLogger(__name__)

SAME_SIGNAL_S = 1.0  # `timeout` and service managers signal a process and then its group


class LifecycleHooks:
    """Work around serving, such as loading models; subclasses override what they need."""

    keys: Keys | None = None  # of the server; None: it needs none

    async def before_listening(self, server: Server) -> None:
        """Runs before the ports open."""

    async def after_listening(self, server: Server, address: Address) -> None:
        """Runs when the ports are open; `address` is that of the inference API. An error stops the server."""

    async def after_closing(self, server: Server) -> None:
        """Runs when the ports are closed, before the models stop."""


def run_server(
    config: ServerConfig, hooks: LifecycleHooks, logs: Logs | None = None, events: ServerEvents | None = None
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    began = time.monotonic()
    check_protection(config)
    logs = logs or open_logs(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(serve_until_signal(config, hooks, began, logs, events))
        except asyncio.CancelledError:
            logger.warning("stopped immediately by a second signal")
            sys.exit(1)
        finally:
            logs.close()


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def serve_until_signal(
    config: ServerConfig, hooks: LifecycleHooks, began: float, logs: Logs, events: ServerEvents | None
) -> None:
    stop = asyncio.Event()
    catch_signals(stop)
    keys = hooks.keys = Keys(config.keys) if config.needs_keys else None
    if keys is not None and keys.file is not None:
        logger.info("token authorization is on; the keys are in %s", keys.file)
    async with Server(config, logs, events=events) as server:
        if keys is not None:
            server.tenants = keys.tenants
        if not await finished_before(stop, hooks.before_listening(server)):
            return
        routes = routes_by_address(server, keys)
        async with open_grpc(server, keys) as grpc, HttpFrontend(server, routes, keys) as frontend:
            logger.info("listening on %s after %.2f s", frontend.inference, time.monotonic() - began)
            logger.info(describe_addresses(config, frontend.opened, has_grpc=grpc is not None))
            start_collecting()
            await finished_before(stop, hooks.after_listening(server, frontend.inference))
            await stop.wait()
            logger.info("stopping: accepted requests are answered first")
            if grpc is not None:
                grpc.drain()  # at the same time as HTTP
        await hooks.after_closing(server)
    logger.info("stopped")


def describe_addresses(config: ServerConfig, opened: Mapping[Address, Address], *, has_grpc: bool) -> str:
    """The addresses of the other APIs for the log; `opened` has the actual ports of HTTP."""
    parts = [f"management API {opened[config.management]}"]
    if config.pages and config.management.path is None:
        parts.append(f"console {opened[config.management]}/")
    if config.metrics is not None:
        parts.append(f"metrics {opened[config.metrics]}/metrics")
    if config.inference.path is None:
        parts.append(f"OpenAI base URL {opened[config.inference]}/v1")
    if has_grpc and config.grpc.inference is not None:
        parts.append(f"gRPC inference {config.grpc.inference.host}:{config.grpc.inference.port}")
    if has_grpc and config.grpc.management is not None:
        parts.append(f"gRPC management {config.grpc.management.host}:{config.grpc.management.port}")
    return ", ".join(parts)


def start_collecting() -> None:
    """Let the garbage collector run, which commands that serve disable: of hundreds of modules, nothing is garbage."""
    gc.freeze()  # what is loaded now stays, so the collector need not traverse it
    gc.enable()


def mark_started(server: Server) -> None:
    """Set the startup probe to ready: the initial models have loaded or failed."""
    server.has_started = True
    gc.collect()
    gc.freeze()  # so do the models


async def finished_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run a coroutine until it ends or `stop` is set, whichever is first; raise its error."""
    tasks = working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if working.cancelled():
        return False
    working.result()
    return not stopping.done() or stopping.cancelled()


def open_grpc(server: Server, keys: Keys | None) -> AbstractAsyncContextManager[GrpcFrontend | None]:
    """The gRPC frontend if it has an address; grpcio is imported only then."""
    config = server.config.grpc
    if config.inference is None and config.management is None:
        return nullcontext()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the frontend logs errors itself
    try:
        from flambeau.frontend.grpc.frontend import GrpcFrontend
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in (
            "grpc",
            "grpc_health",
            "grpc_reflection",
            "google",
        ):
            raise
        text = "gRPC needs packages that are not installed: pip install flambeau[grpc]"
        if not config.is_optional:
            raise ConfigError(text) from None
        logger.warning("%s; its ports stay closed", text)
        return nullcontext()
    return GrpcFrontend(server, keys)


def is_second_signal(first_at: float, now: float) -> bool:
    """Whether a signal is another one, and not the same sent twice."""
    return now - first_at >= SAME_SIGNAL_S


def catch_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and Ctrl-C; cancel the main task on a second signal."""
    loop = asyncio.get_running_loop()
    main_task = asyncio.current_task()
    first_at: float | None = None

    def on_signal() -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
            stop.set()
        elif is_second_signal(first_at, loop.time()) and main_task is not None:
            main_task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
