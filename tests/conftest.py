"""Fixtures shared by all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import support.site.sitecustomize  # noqa: F401  (for tests that import torchvision themselves)
from support.configured import ConfiguredServer
from support.running import HANDLERS, RunningServer

UNIT = Path(__file__).parent / "unit"

# Tests start hundreds of processes; without bytecode files each would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Inductor would start a process for each core, which imports torch, and compile probes of the processor's instructions.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Threads of OpenMP that wait for each other keep the cores busy, which other processes of the tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The trace of torch's compiler is computed if anything listens, and pytest does where a logger does not propagate.
logging.getLogger("torch.__trace").addHandler = lambda handler: None

gc.disable()  # until all tests are collected: modules are no garbage


async def load_grpc() -> None:
    """Import gRPC inside a loop: outside, it creates one that is never closed, and a later test would fail for it."""
    import flambeau.frontend.grpc  # noqa: F401


asyncio.run(load_grpc())

settings.register_profile("steady", deadline=None)  # a slow example on a busy machine is not a failure
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The thread's event loop, as in a worker: the loader would create one that is never closed."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start servers; a handler of tests/support/handlers may be named without its folder."""
    running: list[RunningServer] = []
    numbers = itertools.count()

    def start_server(*arguments: str | Path, env: dict[str, str] | None = None) -> RunningServer:
        words = [
            str(HANDLERS / a) if isinstance(a, str) and a.endswith(".py") and "/" not in a else str(a)
            for a in arguments
        ]
        server = RunningServer(tmp_path / f"server-{next(numbers)}.log", *words, env=env)
        running.append(server)
        return server

    yield start_server
    for server in running:
        server.stop(timeout=40)


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """A ready server with these arguments that the tests of a module share."""
    running: dict[tuple[str, ...], RunningServer] = {}

    def share_server(*arguments: str) -> RunningServer:
        if arguments not in running:
            words = [str(HANDLERS / word) if word.endswith(".py") else word for word in arguments]
            running[arguments] = RunningServer(tmp_path_factory.mktemp("shared") / "server.log", *words)
        return running[arguments].wait_ready()

    yield share_server
    for server in running.values():
        server.stop(timeout=40)


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Callable[..., ConfiguredServer]]:
    """Start servers with settings of a ServerConfig, by the names of its fields."""
    running: list[ConfiguredServer] = []
    numbers = itertools.count()

    def start_server(*models: Path, env: dict[str, str] | None = None, **settings: Any) -> ConfiguredServer:
        folder = tmp_path / f"configured-{next(numbers)}"
        folder.mkdir()
        running.append(ConfiguredServer(folder, *models, env=env, **settings))
        return running[-1].wait_started()

    yield start_server
    for server in running:
        server.stop(timeout=40)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that none of them is left to one process at the end.

    The others are mixed: unit tests compute while those of servers wait.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    unit, others = (
        [*dict.fromkeys(item.path for item in items if item.path.is_relative_to(UNIT) == is_unit)]
        for is_unit in (True, False)
    )
    places = {path: place / len(files) for files in (unit, others) for place, path in enumerate(files)}
    items.sort(key=lambda item: (item.path not in slow, places[item.path]))


def pytest_collection_finish() -> None:
    """The collector leaves out what is there by now: torch, transformers and thousands of tests, which all stay."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # with the usual 700, collections are a tenth of the time of tests with networks
    gc.enable()
