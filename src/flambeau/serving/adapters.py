"""AdapterTable: which adapters requests to a model may name; load and unload them on its workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, FlambeauError, JobFailed, ModelNotFound, Unavailable
from flambeau.logs.line_formats import printable
from flambeau.serving.job import Job, ReplyCollector, RequestBody
from flambeau.wire.generation import Adapter, AdapterChange, encode_adapter_change

if TYPE_CHECKING:
    from flambeau.serving.model import Model
    from flambeau.serving.workers.remote_worker import RemoteWorker


logger = logging.getLogger(__name__)


class AdapterTable:
    """The adapters of the model's own settings, and those that were loaded while it is served."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._configured = frozenset(names_in(options or {}))  # until a worker reports them
        self._loaded: dict[str, Adapter] = {}
        self._removed: set[str] = set()  # of those in the settings
        self._serials = itertools.count(1)

    @property
    def names(self) -> list[str]:
        return [*sorted(self._configured - self._removed), *self._loaded]

    def configure(self, names: Iterable[str]) -> None:
        """Note what a worker has loaded by its settings."""
        self._configured = frozenset(names)

    def find(self, name: str) -> Adapter | None:
        if name in self._loaded:
            return self._loaded[name]
        return Adapter(name) if name in self._configured and name not in self._removed else None

    def new(self, name: str, path: str) -> Adapter:
        """An adapter that is not in the table yet; its serial tells it from others that had the same name."""
        return Adapter(name, path, next(self._serials))

    def add(self, adapter: Adapter) -> None:
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        if self._loaded.pop(name, None) is None:
            self._removed.add(name)


def names_in(options: Mapping[str, Any]) -> list[str]:
    """The names of the adapters in a model-config.yaml; a worker that loads the model checks them."""
    section = options.get("handler")
    given = (section.get("lora_adapters") if isinstance(section, Mapping) else None) or options.get("lora_adapters")
    return [str(name) for name in given] if isinstance(given, Mapping) else []


async def load_adapter(model: Model, name: str, path: str) -> None:
    """Load an adapter on all workers, or on none; workers that start later load it with their first request for it."""
    if name == model.name:
        raise BadRequest(f"{name!r} is the name of the model itself; choose another name for the adapter.")
    if model.adapters.find(name) is not None:
        raise BadRequest(
            f"The model {model.name!r} has an adapter {name!r} already; unload it first, or choose another name."
        )
    workers = ready_workers(model)
    adapter = model.adapters.new(name, path)
    try:
        await change(model, workers, AdapterChange(adapter, True))
    except FlambeauError:
        await change(model, ready_workers(model), AdapterChange(adapter, False))
        raise
    model.adapters.add(adapter)
    logger.info("model %s has loaded the adapter %s from %s", *map(printable, (model.name, name, path)))


async def unload_adapter(model: Model, name: str) -> None:
    """Accept no more requests for an adapter; those that run are finished."""
    adapter = model.adapters.find(name)
    if adapter is None:
        known = ", ".join(model.adapters.names) or "none"
        raise ModelNotFound(f"The model {model.name!r} has no adapter {name!r}; it has {known}.")
    model.adapters.remove(name)
    await change(model, [worker for worker in model.pool.workers if worker.is_ready], AdapterChange(adapter, False))
    logger.info("model %s has unloaded the adapter %s", *map(printable, (model.name, name)))


def ready_workers(model: Model) -> list[RemoteWorker]:
    workers = [worker for worker in model.pool.workers if worker.is_ready and not worker.is_retiring]
    if not workers:
        raise Unavailable(
            f"The model {model.name!r} has no worker that could load an adapter; try again when it is ready."
        )
    return workers


async def change(model: Model, workers: Sequence[RemoteWorker], what: AdapterChange) -> None:
    """Send a change to these workers and wait for all; raises the first error."""
    answers = [ReplyCollector() for _ in workers]
    now = asyncio.get_running_loop().time()
    body = encode_adapter_change(what)
    jobs = [
        Job(
            answer,
            request_id=str(uuid.uuid4()),
            headers=[],
            body=RequestBody(body),
            arrived=now,
            kind="adapter",
        )
        for answer in answers
    ]
    for worker, job in zip(workers, jobs, strict=True):
        worker.send([job])
    try:
        async with asyncio.timeout(model.config.response_timeout_s):
            results = await asyncio.gather(*(answer.done for answer in answers), return_exceptions=True)
    except TimeoutError:
        text = f"The workers of {model.name!r} did not answer within {model.config.response_timeout_s:g} s."
        raise JobFailed(text, status=500) from None
    finally:
        for job in jobs:
            job.cancel()
    for result in results:
        if isinstance(result, BaseException):
            raise result
