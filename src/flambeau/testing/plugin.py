"""Pytest fixtures for handlers. Their imports are lazy, as pytest loads this module in every project."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flambeau.testing.context import HandlerContext
    from flambeau.testing.server import ModelServer

DRAIN_S = 5  # for requests that a test has not waited for


@pytest.fixture
def model_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ModelServer]]:
    """Starts servers: `model_server("handler.py", batch_size=4)`; the options are those of `flambeau serve`.

    Paths are relative to the test's folder, else to the current folder. The call returns when the models are ready;
    if one is not, the test fails with the server's log. Servers stop at the end of the test.
    """
    from flambeau.client.local_server import to_arguments
    from flambeau.testing.server import START_S, ModelServer

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
            server.wait_started()  # also returns for a model that failed to load and will be retried
            if not server.is_ready:
                raise AssertionError(f"a model could not be loaded:\n{server.log}")
        except AssertionError as error:
            pytest.fail(f"the model server is not ready: {error}", pytrace=False)
        return server

    yield start
    for server in running:
        server.stop(timeout=DRAIN_S + 15)


@pytest.fixture
def handler_context(tmp_path: Path) -> Callable[..., HandlerContext]:
    """Creates a context as a worker does: `handler_context(model_dir=…, config={…}, requests=[…])`."""
    from flambeau.testing.context import new_handler_context

    def make(**given: Any) -> HandlerContext:
        return new_handler_context(**{"model_dir": tmp_path, **given})

    return make


def find(path: str | Path, folder: Path) -> Path:
    """A path relative to `folder` if it exists there, else to the current folder."""
    beside = folder / path
    return beside if beside.exists() else Path(path).absolute()
