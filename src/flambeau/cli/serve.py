"""`flambeau serve`: from paths to a running server, until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.archive.folders import CONFIG, MODEL_SUFFIXES
from flambeau.archive.manifest import MANIFEST
from flambeau.cli.progress import Progress
from flambeau.config.model import ModelConfig
from flambeau.config.server import Address, ServerConfig, check_protection
from flambeau.errors import ConfigError, FlambeauError, WorkersFailed
from flambeau.frontend.common.authorization import Keys
from flambeau.frontend.http.frontend import HttpFrontend
from flambeau.frontend.routes import routes_by_address
from flambeau.logs.setup import open_logs
from flambeau.logs.writer import Logs
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.serving.sources.store import ARCHIVE_SUFFIXES, models_in

if TYPE_CHECKING:
    from flambeau.frontend.grpc.frontend import GrpcFrontend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the command line asks of every model it names."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # they beat the model's own YAML
    default_workers: int = 1
    name: str | None = None
    handler: str | None = None
    must_load: bool = False  # one that cannot be loaded, now or later, ends the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One model to load at start."""

    path: Path
    name: str | None = None
    handler: str | None = None
    is_required: bool = True  # named by the operator, not just found in a store


def serve(config: ServerConfig, paths: Sequence[Path], wishes: Wishes, *, log_level: str) -> None:
    """Serve what these paths stand for, until a signal."""
    logs = open_logs(config, log_level)
    plans = [plan for path in paths for plan in plans_for(path, wishes)]
    if not paths and config.model_store is None:
        plans = [*example_plans(wishes)]
    start(config, Loading(plans, wishes), logs)


class Life:
    """What happens around serving: which models are loaded, and when, and what is told about it."""

    async def prepare(self, server: Server) -> None:
        """Do what comes before the ports open."""

    async def begin(self, server: Server, address: Address) -> None:
        """Do what comes when they are open; an error stops the server."""

    async def end(self, server: Server) -> None:
        """Do what comes when they are closed, while the models are still there."""


class Loading(Life):
    """Opens the ports at once and loads its models then; probes tell when they are ready."""

    def __init__(self, plans: Sequence[Plan], wishes: Wishes) -> None:
        self._plans = plans
        self._wishes = wishes

    async def begin(self, server: Server, address: Address) -> None:
        """Load the models named at start, all at a time, and tell how it went."""
        for plan in self._plans:
            logger.info("Loading initial models: %s", plan.path.name)
        progress = Progress.for_terminal()
        server.on_progress = progress.note
        with progress:
            await asyncio.gather(*(load(server, plan, self._wishes, progress) for plan in self._plans))
            if self._wishes.must_load:
                named = [model for model in server.registry if model.loaded_at_startup]
                await asyncio.gather(*(model.supervisor.wait_decided() for model in named))
        settle(server)
        logger.info("Model server started.")
        progress.announce(address, [model for model in server.registry if model.is_ready])


def settle(server: Server) -> None:
    """Note that the models named at start have loaded or failed."""
    server.has_started = True
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not look at it again


def start(config: ServerConfig, life: Life, logs: Logs | None = None) -> None:
    """Serve until a signal."""
    began = time.monotonic()
    check_protection(config)
    logs = logs or open_logs(config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(run(config, life, began, logs))
        except asyncio.CancelledError:
            logger.warning("stopped at once, by a second signal")
            sys.exit(1)
        finally:
            logs.close()


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


def store_of(paths: Sequence[Path], named: Path | None) -> Path | None:
    """The model store: the one that was named, or a store among the paths."""
    return named or next((path for path in paths if path.is_dir() and not is_model(path)), None)


def is_model(folder: Path) -> bool:
    """Whether a folder is a model, not a store of models."""
    return any((folder / name).is_file() for name in (MANIFEST, "handler.py", CONFIG))


def example_plans(wishes: Wishes) -> Iterator[Plan]:
    """What is served where nothing is named: a language model and an ordinary one, side by side."""
    from flambeau.examples import digits, shakespeare

    yield from plans_for(digits.archive(), wishes)
    if lacking := shakespeare.missing():
        logger.warning("the example language model needs %s: pip install 'flambeau[llm]'", ", ".join(lacking))
    else:
        yield Plan(path=shakespeare.FOLDER, name=shakespeare.NAME)


def plans_for(path: Path, wishes: Wishes) -> Iterator[Plan]:
    """The models that a path on the command line stands for."""
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; name a handler file, a model file, an archive, a model folder or a store"
        )
    if path.suffix == ".py":
        yield Plan(path=path, name=wishes.name or path.stem, handler=wishes.handler or path.name)
    elif path.suffix in MODEL_SUFFIXES:
        yield Plan(path=path, name=wishes.name or path.stem, handler=wishes.handler)
    elif path.is_file() and not path.name.endswith(ARCHIVE_SUFFIXES):
        raise ConfigError(
            f"{path} is not a handler file (.py), not a model file ({', '.join(MODEL_SUFFIXES)}) and not an archive "
            f"({', '.join(ARCHIVE_SUFFIXES)})"
        )
    elif path.is_file() or (path / MANIFEST).is_file():
        yield Plan(path=path, name=wishes.name, handler=wishes.handler)
    elif is_model(path) or (wishes.handler and not models_in(path)):
        own = "handler.py" if (path / "handler.py").is_file() else None
        yield Plan(path=path, name=wishes.name or path.resolve().name, handler=wishes.handler or own)
    else:
        found = models_in(path)
        if not found:
            logger.warning("the model store %s holds no models yet; register them while the server runs", path)
        yield from (Plan(path=model, is_required=False) for model in found)


async def run(config: ServerConfig, life: Life, began: float, logs: Logs) -> None:
    """The life of the process: prepare, open, serve, drain, close."""
    stop = asyncio.Event()
    catch_signals(stop)
    keys = Keys(config.keys) if config.needs_keys else None
    if keys is not None and keys.file is not None:
        logger.info("token authorization is on; the keys are in %s", keys.file)
    async with Server(config, logs) as server:
        if not await done_before(stop, life.prepare(server)):
            return
        routes = routes_by_address(server, keys)
        async with grpc_ports(server, keys) as grpc, HttpFrontend(server, routes, keys) as frontend:
            logger.info("listening on %s after %.2f s", frontend.inference, time.monotonic() - began)
            await done_before(stop, life.begin(server, frontend.inference))
            await stop.wait()
            logger.info("stopping: accepted requests are answered first")
            if grpc is not None:
                grpc.drain()  # at the same time as HTTP
        await life.end(server)
    logger.info("stopped")


async def done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do some work, unless a signal comes first; its errors are ours."""
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


def grpc_ports(server: Server, keys: Keys | None) -> AbstractAsyncContextManager[GrpcFrontend | None]:
    """The gRPC ports, if there are any; grpcio is loaded only then."""
    config = server.config.grpc
    if config.inference is None and config.management is None:
        return nullcontext()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is told by us
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


def catch_signals(stop: asyncio.Event) -> None:
    """SIGTERM and Ctrl-C drain; a second one does not wait."""
    loop = asyncio.get_running_loop()
    main_task = asyncio.current_task()

    def on_signal() -> None:
        if stop.is_set() and main_task is not None:
            main_task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def load(server: Server, plan: Plan, wishes: Wishes, progress: Progress) -> Model | None:
    """Load one model. A model that cannot start stays registered, and is tried again where that may help; readiness
    says so.
    """
    name = plan.name or plan.path.name
    config = ModelConfig(
        min_workers=wishes.default_workers,
        max_workers=wishes.default_workers,
        response_timeout_s=server.config.default_response_timeout_s,
        startup_timeout_s=server.config.default_startup_timeout_s,
        queue_size=server.config.job_queue_size,
    )
    with progress.loading(name) as outcome:
        try:
            return await server.register(
                plan.path.name,
                path=plan.path,
                name=plan.name,
                handler=plan.handler,
                config=config,
                wishes=wishes.settings,
                at_startup=True,
            )
        except WorkersFailed as error:
            outcome.failed = True
            if not error.is_final:  # of which all is said
                logger.error("%s: %s; it will be tried again", error, error.cause.partition("\n")[0])
        except FlambeauError as error:
            outcome.failed = True
            if plan.is_required:
                raise
            logger.error("%s was not loaded: %s", plan.path.name, error)
    return None
