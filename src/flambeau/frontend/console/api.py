"""ConsoleApi: the files of the page, and a stream of server-sent events with the state of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flambeau.errors import BadRequest, InvalidKey, Unavailable
from flambeau.frontend.authorization import Keys
from flambeau.frontend.console import uploads
from flambeau.frontend.console.activity import FIELDS, KEPT, WINDOW, Activity
from flambeau.frontend.console.documents import (
    failure_documents,
    model_document,
    output_document,
    server_document,
    settings_document,
)
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.errors import respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.pages import StaticFiles, other_address
from flambeau.frontend.http.router import Endpoint, not_allowed, not_found, query_of
from flambeau.metrics.system import HostReader, Reading, read_gpus
from flambeau.serving.model import Model
from flambeau.serving.model_sources.store import models_in
from flambeau.serving.server import Server
from flambeau.serving.slow_requests import slowest_of
from flambeau.serving.workers.host_resources import gpu_properties

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
INTERVAL_S = 1.0
GPUS_EVERY = 5  # samples
UPLOAD_PIECE_BYTES = 4 << 20
MAX_VIEWERS = 64
MAX_SLOW = 8
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
        self._gpus: dict[str, str] = {}  # names by index
        self._reading_gpus: asyncio.Task[None] | None = None
        self._started_at = time.time()
        self._sampling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample, on the event loop that runs."""
        self._sampling = asyncio.get_running_loop().create_task(self._sample_on())

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
            case ["uploads", name]:
                self.check(exchange, segments)
                return self._upload(exchange, name)
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
        exchange.checks_key = True
        watched = self._viewers[exchange] = query_of(exchange).get("model", "")
        exchange.on_gone = lambda: self._viewers.pop(exchange, None)
        exchange.send([event("history", self._history()), event("state", self._state(exchange.host, watched))])

    async def _sample_on(self) -> None:
        """Sample all the time: whoever looks after a failure finds the minutes before it. It takes microseconds."""
        while not self._server.is_draining:
            try:
                await self._sample()
                await self._send_states()
            except Exception:  # the next sample may succeed; meanwhile pages tell that they are not current
                logger.exception("the console's sample failed")
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
            if exchange in self._viewers and not self._end_if_revoked(exchange):
                exchange.send([states[key]])

    def _end_if_revoked(self, exchange: Exchange) -> bool:
        """End the stream of a viewer whose key was revoked or has expired since it began."""
        try:
            self.check(exchange, [])
        except InvalidKey as error:
            del self._viewers[exchange]
            exchange.send([event("end", {"reason": error.plain or str(error)})], ends=True)
            return True
        return False

    async def _sample(self) -> None:
        self._num_samples += 1
        self._activity.add(self._server.registry, time.monotonic())
        if not self._viewers and self._state_of_host:
            return
        self._note(await asyncio.to_thread(self._host.read, gpus=False))
        is_due = self._num_samples % GPUS_EVERY == 0 or self._reading_gpus is None
        if self._server.num_gpus and is_due and (self._reading_gpus is None or self._reading_gpus.done()):
            self._reading_gpus = asyncio.get_running_loop().create_task(self._read_gpus())

    async def _read_gpus(self) -> None:
        """nvidia-smi takes a while, for which samples do not wait."""
        if not self._gpus:
            self._gpus = {row[0]: row[1] for row in await asyncio.to_thread(gpu_properties)}
        self._note(await asyncio.to_thread(lambda: [*read_gpus()]))

    def _note(self, readings: Iterable[Reading]) -> None:
        for name, _, value, device in readings:
            self._state_of_host[name if device is None else f"{name}:{device}"] = round(value, 1)

    def _history(self) -> dict[str, Any]:
        return {
            "fields": FIELDS,
            "kept": KEPT,
            "sample": self._num_samples,
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
        followed = next((model for model in models if f"{model.name}/{model.version}" == watched), None)
        return {
            **server_document(server, self._state_of_host),
            "sample": self._num_samples,
            "gpus": self._gpus,
            "time": time.time(),
            "startedAt": self._started_at,
            "inference": other_address(server.config.inference, host),
            "models": [self._model_state(model, details=details) for model in models],
            "failures": failure_documents(models, details=details),
            "details": None if followed is None else details_of(followed),
        }

    def _model_state(self, model: Model, *, details: bool) -> dict[str, Any]:
        key = (model.name, model.version)
        return {
            **model_document(model, details=details),
            "isDefault": self._server.registry.is_default(model),
            "recent": self._activity.recent(key),
            "sample": self._activity.latest(key),
        }

    # ---- the store ----

    async def _list_store(self, exchange: Exchange) -> None:
        """The archives and folders of the model store."""
        folder = self._server.config.model_store
        found = [] if folder is None else await asyncio.to_thread(models_in, folder)
        taken = {model.source.url for model in self._server.registry}
        document = {
            "store": folder is not None,
            "models": [{"name": path.name, "isRegistered": path.name in taken} for path in found],
            "uploads": self._server.config.allow_uploads,
            "pieceBytes": min(UPLOAD_PIECE_BYTES, self._server.config.max_request_bytes),
        }
        respond_json(exchange, 200, document)

    async def _upload(self, exchange: Exchange, name: str) -> None:
        """PUT a piece of an archive, ?offset=…&size=…; DELETE forgets those that were put."""
        store = uploads.check_allowed(self._server.config)
        if exchange.method == "DELETE":
            await asyncio.to_thread(uploads.discard, store, name)
            respond_json(exchange, 200, {"status": f"{name} is not uploaded"})
            return
        if exchange.method != "PUT":
            not_allowed(exchange)
            return
        query = query_of(exchange)
        try:
            offset, size = int(query.get("offset", "")), int(query.get("size", ""))
        except ValueError:
            raise BadRequest("a piece of an archive needs offset and size in bytes: ?offset=0&size=1000") from None
        piece = take_bytes(exchange)
        is_done = await asyncio.to_thread(uploads.add_piece, store, name, piece, offset=offset, size=size)
        if is_done:
            logger.info("%s was uploaded into the model store: %d bytes", name, size)
        respond_json(exchange, 200, {"status": "uploaded" if is_done else "continue", "offset": offset + len(piece)})


def details_of(model: Model) -> dict[str, Any]:
    """What only the page of a model shows."""
    pool = model.pool
    return {
        "settings": settings_document(model.config, pool.min_workers, pool.max_workers),
        "output": output_document(model),
        "slow": msgspec.to_builtins(slowest_of([model.slow], MAX_SLOW)),
    }


def event(name: str, document: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(document))
