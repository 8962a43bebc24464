"""IdempotentReplies: a request with an Idempotency-Key runs once; those that repeat it get the same response.

Whole HTTP responses are kept, not parts of jobs: an answer of a chat has an id, and a stored one a place, only once its
response is written. What is kept is what a handler has answered; after a rejection, a time-out or the death of a worker
the same key runs again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, Protocol

from flambeau.errors import (
    BadRequest,
    DeadlinePassed,
    FlambeauError,
    IdempotencyKeyReused,
    JobFailed,
    RequestRepeated,
)
from flambeau.frontend.http.bodies import bytes_of, media_type_of
from flambeau.frontend.http.exchange import Exchange, ExchangeConnection, Header
from flambeau.serving.job import TIMEOUT_HEADER, timeout_named
from flambeau.serving.kept_replies import KeptReplies

logger = logging.getLogger(__name__)

REPLAYED: Header = ("Idempotency-Replayed", "true")
MAX_KEY = 255  # characters
MAX_WAITING = 1000  # requests that wait for the response of one
SLICE_BYTES = 1 << 20  # of a body, hashed before other work gets a turn
OVERHEAD = 512  # bytes of an entry beside its response, about
STREAMED = "as a stream, which is not kept; send a new key to run it again, or ask for a reply that is not streamed"

Work = Coroutine[Any, Any, None] | None
Name = tuple[str, str]  # the caller's key of this server, and the one of the request
# A handler's answer is kept. Other responses are shared with those that wait, or one of these runs instead.
Outcome = Literal["kept", "shared", "again"]


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A whole response, and the names in its access log line and headers."""

    status: int
    body: bytes
    headers: tuple[Header, ...]
    phrase: str = ""
    model_name: str = ""
    model_version: str = ""

    def send(self, exchange: Exchange, headers: Sequence[Header] = ()) -> None:
        exchange.model_name, exchange.model_version = self.model_name, self.model_version
        exchange.respond(self.status, self.body, [*self.headers, *headers], self.phrase)


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request that was answered; without a response, by a stream."""

    fingerprint: bytes
    response: WholeResponse | None
    expires: float

    @property
    def size_bytes(self) -> int:
        if (kept := self.response) is None:
            return OVERHEAD
        return len(kept.body) + sum(len(name) + len(value) for name, value in kept.headers) + OVERHEAD


class Responder(Protocol):
    """Handles an exchange from the start, or rejects it."""

    def handle(self, exchange: Exchange) -> None: ...

    def reject(self, exchange: Exchange, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    responder: Responder
    expiry: asyncio.TimerHandle | None


class IdempotentExchange(Exchange):
    """An exchange whose request has an Idempotency-Key. If it runs, those that repeat it get the same response."""

    __slots__ = ("_error", "idempotency_key", "running")

    def __init__(
        self,
        connection: ExchangeConnection,
        method: str,
        target: str,
        headers: list[Header],
        version: str,
        arrived: float,
        idempotency_key: str,
    ) -> None:
        super().__init__(connection, method, target, headers, version, arrived)
        self.idempotency_key = idempotency_key
        self.running: RunningRequest | None = None
        self._error: FlambeauError | None = None

    def note_error(self, error: FlambeauError) -> None:
        self._error = error

    def respond(self, status: int, body: bytes, headers: Iterable[Header] = (), phrase: str = "") -> None:
        running, self.running = self.running, None
        if running is None:
            super().respond(status, body, headers, phrase)
            return
        response = WholeResponse(status, body, tuple(headers), phrase, self.model_name, self.model_version)
        outcome = self._outcome(status)
        try:
            super().respond(status, body, response.headers, phrase)
        finally:
            running.end(response, outcome)

    def _outcome(self, status: int) -> Outcome:
        error = self._error
        if error is None:
            has_answer = self.job is not None and self.job.started
            return "kept" if status < 400 or has_answer else "shared"
        if isinstance(error, JobFailed):
            return "kept"
        return "again" if isinstance(error, DeadlinePassed) else "shared"

    def start(self, status: int, headers: Iterable[Header] = (), phrase: str = "", *, has_trailer: bool = True) -> None:
        super().start(status, headers, phrase, has_trailer=has_trailer)
        if self.running is not None:
            self.running.stream()

    def send(self, chunks: Sequence[bytes], *, ends: bool = False) -> None:
        super().send(chunks, ends=ends)
        if ends and self.running is not None:
            running, self.running = self.running, None
            running.end(None, "kept" if self._error is None else "again")

    def abort(self) -> None:
        self._forget()
        super().abort()

    def drop(self) -> None:
        """The client has disconnected; the work goes on while others wait for its response."""
        if self.running is not None and self.running.waiting:
            self.running.is_orphan = True
        else:
            self.cancel()

    def cancel(self) -> None:
        self._forget()
        super().drop()

    def _forget(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.end(None, "again")


class RunningRequest:
    """A request that runs, and those that repeat it and wait for its response."""

    __slots__ = ("_exchange", "_settle", "fingerprint", "is_orphan", "is_streamed", "waiting")

    def __init__(
        self,
        exchange: IdempotentExchange,
        fingerprint: bytes,
        settle: Callable[[RunningRequest, WholeResponse | None, Outcome], None],
    ) -> None:
        self.fingerprint = fingerprint
        self.waiting: dict[Exchange, WaitingRequest] = {}
        self.is_orphan = False  # its client has disconnected
        self.is_streamed = False
        self._exchange, self._settle = exchange, settle

    def end(self, response: WholeResponse | None, outcome: Outcome) -> None:
        self.is_orphan = False  # there is nothing left to cancel
        self._settle(self, response, outcome)

    def stream(self) -> None:
        """The response is a stream, which is not repeated. If its client has gone, one that waits takes its place."""
        if self.is_orphan:
            self._exchange.cancel()
            return
        self.is_streamed = True
        for exchange, waiting in self.take_waiting():
            waiting.responder.reject(exchange, RequestRepeated(f"The same request is being answered {STREAMED}"))

    def leave(self, exchange: Exchange) -> None:
        """An exchange waits no longer; nobody may be left who waits."""
        if (waiting := self.waiting.pop(exchange, None)) is not None and waiting.expiry is not None:
            waiting.expiry.cancel()
        if self.is_orphan and not self.waiting:
            self._exchange.cancel()

    def take_waiting(self) -> list[tuple[Exchange, WaitingRequest]]:
        found = [*self.waiting.items()]
        self.waiting.clear()
        for exchange, waiting in found:
            exchange.on_gone = None
            if waiting.expiry is not None:
                waiting.expiry.cancel()
        return found


class IdempotentReplies:
    """The responses to requests with an Idempotency-Key, for some time and up to a size; the oldest leave first."""

    def __init__(self, max_bytes: int, max_age_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s, self._now = max_age_s, now
        self._kept: KeptReplies[Name, AnsweredRequest] = KeptReplies(max_bytes)
        self._running: dict[Name, RunningRequest] = {}

    def run(self, exchange: IdempotentExchange, endpoint: Callable[[], Work], responder: Responder) -> Work:
        """Run an endpoint, unless the same request has run or runs. The caller's key of this server is checked."""
        size = len(exchange.idempotency_key)
        if not 0 < size <= MAX_KEY:
            found = f"has {size} characters" if size else "is empty"
            raise BadRequest(f"The header Idempotency-Key {found}; send 1 to {MAX_KEY} characters, such as a UUID.")
        if exchange.body is not None and exchange.body.size_bytes > SLICE_BYTES:
            return self._run_large(exchange, endpoint, responder)
        return self._run(exchange, endpoint, responder, fingerprint_of(exchange))

    async def _run_large(
        self, exchange: IdempotentExchange, endpoint: Callable[[], Work], responder: Responder
    ) -> None:
        fingerprint = await fingerprint_in_slices(exchange)
        work = self._run(exchange, endpoint, responder, fingerprint)
        if work is not None:
            await work

    def _run(
        self, exchange: IdempotentExchange, endpoint: Callable[[], Work], responder: Responder, fingerprint: bytes
    ) -> Work:
        name = (exchange.key_name, exchange.idempotency_key)
        running = self._running.get(name)
        entry = self._kept.find(name, self._now()) if running is None else None
        known = running or entry
        if known is None:
            settle = partial(self._settle, name)
            self._running[name] = exchange.running = RunningRequest(exchange, fingerprint, settle)
            return endpoint()
        if known.fingerprint != fingerprint:
            raise IdempotencyKeyReused(exchange.idempotency_key)
        if running is not None:
            self._wait(running, exchange, responder)
        elif entry is not None and entry.response is not None:
            entry.response.send(exchange, (REPLAYED,))
        else:
            raise RequestRepeated(f"The same request was answered {STREAMED}")
        return None

    def _wait(self, running: RunningRequest, exchange: IdempotentExchange, responder: Responder) -> None:
        if running.is_streamed:
            raise RequestRepeated(f"The same request is being answered {STREAMED}")
        if len(running.waiting) >= MAX_WAITING:
            raise RequestRepeated(f"{MAX_WAITING} requests wait for the response to the same one; try again later")
        expiry = None
        if exchange.timeout is not None:
            limit_s = timeout_named(exchange.timeout)
            loop = asyncio.get_running_loop()
            expiry = loop.call_at(exchange.arrived + limit_s, self._expire, running, exchange, limit_s)
        running.waiting[exchange] = WaitingRequest(responder, expiry)
        exchange.on_gone = partial(running.leave, exchange)

    def _expire(self, running: RunningRequest, exchange: Exchange, limit_s: float) -> None:
        responder = running.waiting[exchange].responder
        exchange.on_gone = None
        running.leave(exchange)
        error = DeadlinePassed(f"The same request was not answered within {limit_s:g} s ({TIMEOUT_HEADER}).")
        responder.reject(exchange, error)

    def _settle(self, name: Name, running: RunningRequest, response: WholeResponse | None, outcome: Outcome) -> None:
        del self._running[name]
        if outcome == "kept":
            self._kept.keep(name, AnsweredRequest(running.fingerprint, response, self._now() + self._max_age_s))
        if running.waiting:  # later: this may be within the receiver of a reply
            asyncio.get_running_loop().call_soon(self._answer, running, response, outcome)

    def _answer(self, running: RunningRequest, response: WholeResponse | None, outcome: Outcome) -> None:
        for exchange, waiting in running.take_waiting():
            try:
                if response is None or outcome == "again":
                    waiting.responder.handle(exchange)
                else:
                    response.send(exchange, (REPLAYED,) if outcome == "kept" else ())
            except Exception:  # the others that wait must not suffer
                logger.exception("request %s: it could not be answered", exchange.request_id, extra=exchange.log_fields)
                exchange.abort()


# ---- what makes two requests the same ----


def fingerprint_of(exchange: Exchange) -> bytes:
    """A digest of path, query and body."""
    digest = begin_fingerprint(exchange)
    digest.update(content_of(exchange))
    return digest.digest()


async def fingerprint_in_slices(exchange: Exchange) -> bytes:
    """The same of a large body, while other requests have their turns."""
    digest, content = begin_fingerprint(exchange), content_of(exchange)
    for start in range(0, len(content), SLICE_BYTES):
        digest.update(content[start : start + SLICE_BYTES])
        await asyncio.sleep(0)
    return digest.digest()


def begin_fingerprint(exchange: Exchange) -> blake2b:
    return blake2b(f"{exchange.path}?{exchange.query}\n".encode("latin-1", "replace"), digest_size=32)


def content_of(exchange: Exchange) -> bytes:
    """The body; that of a form without its boundary, which clients choose anew for each request."""
    content = bytes_of(exchange)
    if media_type_of(exchange) == "multipart/form-data":
        _, _, boundary = (exchange.header("content-type") or "").partition("boundary=")
        if boundary := boundary.partition(";")[0].strip().strip('"'):
            content = content.replace(boundary.encode("latin-1", "replace"), b"")
    return content
