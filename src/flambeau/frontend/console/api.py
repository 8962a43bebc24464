"""ConsoleApi: the files of the page, and a stream of server-sent events with the state of the server."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flambeau import __version__
from flambeau.errors import Unavailable
from flambeau.frontend import operations
from flambeau.frontend.authorization import Keys
from flambeau.frontend.console.activity import FIELDS, KEPT, WINDOW, Activity
from flambeau.frontend.http.errors import respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.pages import StaticFiles, other_address
from flambeau.frontend.http.router import Endpoint, not_allowed, not_found, query_of
from flambeau.logs.line_formats import masked
from flambeau.metrics.system import HostReader, resident_bytes
from flambeau.serving.model import Model
from flambeau.serving.model_sources.store import models_in
from flambeau.serving.server import Server
from flambeau.serving.workers.host_resources import resident_bytes_of
from flambeau.serving.workers.supervisor import Slot
from flambeau.wire.example_requests import is_json

STATIC = Path(__file__).parent / "static"
INTERVAL_S = 1.0
LINGER_S = 900.0  # sampling goes on so long after the last viewer has gone, so that charts are there again
GPUS_EVERY = 5  # samples: nvidia-smi takes a while
MAX_FAILURES = 20
MAX_VIEWERS = 64
EVENT_HEADERS = (("content-type", "text/event-stream"), ("x-accel-buffering", "no"))


class ConsoleApi:
    """/console: open files; the events, and everything that changes or asks a model, need the management key."""

    def __init__(self, server: Server, keys: Keys | None, inference: Mapping[str, Endpoint]) -> None:
        self._server = server
        self._keys = keys
        self._inference = inference  # the playground's way to models: a page may call its own address only
        self._files = StaticFiles(STATIC)
        self._viewers: dict[Exchange, str] = {}  # and the model whose details each follows
        self._activity = Activity()
        self._host = HostReader()
        self._state_of_host: dict[str, float] = {}
        self._num_samples = 0
        self._last_viewed = 0.0
        self._sampling: asyncio.Task[None] | None = None

    def routes(self) -> dict[str, Endpoint]:
        return {"console": self}

    def home(self, exchange: Exchange, segments: list[str]) -> None:
        """The page."""
        self._files.send(exchange, "index.html")

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        match segments[1:]:
            case [name] if name in self._files.names:
                self._files.send(exchange, name)
            case ["events"]:
                self.check(exchange, segments)
                self._follow(exchange)
            case ["store"]:
                self.check(exchange, segments)
                return self._list_store(exchange)
            case [root, *_] if root in self._inference:
                self.check(exchange, segments)
                return self._inference[root](exchange, segments[1:])
            case _:
                not_found(exchange)
        return None

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Raise InvalidKey unless the caller may manage models."""
        if self._keys is not None:
            self._keys.check("management", exchange.header("authorization"))

    # ---- events ----

    def _follow(self, exchange: Exchange) -> None:
        if exchange.method != "GET":
            not_allowed(exchange)
            return
        if len(self._viewers) >= MAX_VIEWERS:
            raise Unavailable(f"{MAX_VIEWERS} consoles are open already; close one.")
        exchange.start(200, EVENT_HEADERS)
        watched = self._viewers[exchange] = query_of(exchange).get("model", "")
        exchange.on_gone = lambda: self._viewers.pop(exchange, None)
        self._last_viewed = time.monotonic()
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.get_running_loop().create_task(self._sample_while_watched())
            return  # the first sample comes at once
        exchange.send([event("history", self._history()), event("state", self._state(exchange.host, watched))])

    async def _sample_while_watched(self) -> None:
        for exchange in self._viewers:
            exchange.send([event("history", self._history())])
        while not self._server.is_draining:
            await self._sample()
            if self._viewers:
                self._last_viewed = time.monotonic()
            elif time.monotonic() - self._last_viewed > LINGER_S:
                return
            await self._send_states()
            await asyncio.sleep(INTERVAL_S)
        for exchange in [*self._viewers]:
            exchange.send([event("end", {"reason": "the server is stopping"})], ends=True)
        self._viewers.clear()

    async def _send_states(self) -> None:
        states: dict[tuple[str | None, str], bytes] = {}  # most viewers see the same
        for exchange, watched in [*self._viewers.items()]:
            key = (exchange.host, watched)
            if key not in states:
                states[key] = event("state", self._state(*key))
                await asyncio.sleep(0)
            if exchange in self._viewers:
                exchange.send([states[key]])

    async def _sample(self) -> None:
        with_gpus = self._server.num_gpus > 0 and self._num_samples % GPUS_EVERY == 0
        readings = await asyncio.to_thread(self._host.read, gpus=with_gpus)
        for name, _, value, device in readings:
            self._state_of_host[name if device is None else f"{name}:{device}"] = round(value, 1)
        self._num_samples += 1
        tokens = self._server.telemetry.totals_by_model("GeneratedTokens")
        self._activity.add(self._server.registry, tokens, time.monotonic())

    def _history(self) -> dict[str, Any]:
        return {
            "fields": FIELDS,
            "kept": KEPT,
            "window": WINDOW,
            "models": {
                f"{model.name}/{model.version}": self._activity.history((model.name, model.version))
                for model in self._server.registry
            },
        }

    def _state(self, host: str | None, watched: str) -> dict[str, Any]:
        """What a viewer sees that reached this server as `host` and follows the details of one model."""
        server = self._server
        details = server.config.shows_error_details
        models = [model for model in server.registry if model.is_listed]
        return {
            "version": __version__,
            "time": time.time(),
            "ready": server.is_ready,
            "inference": other_address(server.config.inference, host),
            "host": self._state_of_host,
            "serverBytes": resident_bytes(os.getpid()),
            "missing": [{"name": name, "reason": why} for name, why in server.missing.items()],
            "models": [self._model_state(model, details=details) for model in models],
            "failures": failures_of(models, details=details),
            "lines": lines_of(models, watched) if watched else {},
        }

    def _model_state(self, model: Model, *, details: bool) -> dict[str, Any]:
        key = (model.name, model.version)
        pool = model.pool
        return {
            "name": model.name,
            "version": model.version,
            "isDefault": self._server.registry.is_default(model),
            "state": pool.state,
            "handler": model.handler,
            "url": masked(model.source.url),
            "abilities": sorted(model.abilities),
            "example": example_of(model),
            "maxLength": model.max_length,
            "registeredAt": model.registered_at,
            "batchSize": model.config.batch_size,
            "ready": pool.num_ready,
            "wanted": pool.num_wanted,
            "minWorkers": pool.min_workers,
            "maxWorkers": pool.max_workers,
            "waiting": model.num_waiting,
            "inFlight": model.num_in_flight,
            "capacity": model.queue.capacity,
            "restarts": pool.num_restarts,
            "answers": {str(status): count for status, count in model.answers.items()},
            "workers": [worker_state(slot, details=details) for slot in pool.slots],
            "recent": self._activity.recent(key),
            "sample": self._activity.latest(key),
        }

    async def _list_store(self, exchange: Exchange) -> None:
        """The archives and folders of the model store."""
        folder = self._server.config.model_store
        found = [] if folder is None else await asyncio.to_thread(models_in, folder)
        respond_json(exchange, 200, {"store": folder is not None, "models": [path.name for path in found]})


def example_of(model: Model) -> str:
    """A JSON body that the model accepts; empty if none is known."""
    example = model.config.options.get("example")
    if example is not None:
        return example if isinstance(example, str) else json.dumps(example)
    return model.example if is_json(model.example) else ""


def worker_state(slot: Slot, *, details: bool) -> dict[str, Any]:
    worker = slot.worker
    state: dict[str, Any] = {
        "id": slot.id,
        "state": operations.state_of(slot),
        "pid": worker.pid if worker else 0,
        "device": None if slot.device is None else f"cuda:{slot.device}",
        "bytes": resident_bytes_of(worker.pids) if worker and worker.pid else 0,
        "startedAt": slot.started_at,
        "restarts": slot.restarts,
        "running": sum(batch.remaining for batch in worker.batches) if worker else 0,
    }
    if slot.last_exit is not None:
        state["lastFailure"] = operations.failure_document(slot.last_exit, details=details)
    return state


def failures_of(models: list[Model], *, details: bool) -> list[dict[str, Any]]:
    """The last exits of workers, the newest first."""
    exits = [one for model in models for one in model.pool.recent_exits]
    return [
        {
            "time": one.at,
            "model": one.worker.model,
            "version": one.worker.version,
            "worker": one.worker.id,
            **operations.failure_document(one.exit, details=details),
        }
        for one in sorted(exits, key=lambda one: -one.at)[:MAX_FAILURES]
    ]


def lines_of(models: list[Model], watched: str) -> dict[str, list[str]]:
    """The last lines that the workers of a model printed, by worker."""
    return {
        str(worker.spec.id): [*worker.last_lines]
        for model in models
        if f"{model.name}/{model.version}" == watched
        for worker in model.pool.workers
    }


def event(name: str, document: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))
