"""Fixtures for tests of handlers; what they need is imported when a test asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flambeau.testing.context import HandlerContext
    from flambeau.testing.server import ModelServer

DRAIN_S = 5  # a test does not wait long for requests it has left behind


@pytest.fixture
def model_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ModelServer]]:
    """Start servers: `model_server("handler.py", batch_size=4)`; options are those of `flambeau serve`.

    Paths are found beside the test or from the current folder. The call returns when the models are ready, and fails
    with the server's log when they do not get ready. Servers stop at the end of the test.
    """
    from flambeau.testing.server import START_S, ModelServer, to_arguments

    running: list[ModelServer] = []
    numbers = itertools.count()

    def start(
        *paths: str | Path, env: Mapping[str, str] | None = None, start_timeout: float = START_S, **options: Any
    ) -> ModelServer:
        __tracebackhide__ = True
        words = [str(find(path, request.path.parent)) for path in paths]
        log = tmp_path / f"flambeau-{next(numbers)}.log"
        server = ModelServer(log, *words, *to_arguments({"drain_timeout": DRAIN_S, **options}), env=env)
        server.start_timeout_s = start_timeout
        running.append(server)
        try:
            server.wait_started()  # with what failed to load: that is tried again, but not waited for here
            if not server.is_ready:
                raise AssertionError(f"a model could not be loaded:\n{server.log}")
        except AssertionError as error:
            pytest.fail(f"the model server did not get ready: {error}", pytrace=False)
        return server

    yield start
    for server in running:
        server.stop(timeout=DRAIN_S + 15)


@pytest.fixture
def handler_context(tmp_path: Path) -> Callable[..., HandlerContext]:
    """Make a context as a worker would: `handler_context(model_dir=…, config={…}, requests=[…])`."""
    from flambeau.testing.context import new_handler_context

    def make(**given: Any) -> HandlerContext:
        return new_handler_context(**{"model_dir": tmp_path, **given})

    return make


def find(path: str | Path, folder: Path) -> Path:
    """A path as a test names it: beside the test, else from the current folder."""
    beside = folder / path
    return beside if beside.exists() else Path(path).absolute()
