"""ResponseCache: keeps a model's replies, and answers a request that was answered before without a worker.

Requests are the same if all that a handler can see of them is: body, headers, path and query, and the client's key.
A request that arrives while the same one is computed waits for its reply. If that reply cannot be kept, all that wait
are computed. If its client has gone, one of them is, and the others wait for that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Literal

import msgspec

from flambeau.config.model import ModelConfig
from flambeau.errors import FlambeauError, JobFailed
from flambeau.serving.job import Job, Receiver
from flambeau.serving.kept_replies import KeptReplies
from flambeau.wire.messages import Kind, Part, header

logger = logging.getLogger(__name__)

CACHE_HEADER = "x-flambeau-cache"
KINDS: frozenset[Kind] = frozenset(("predict", "explain"))
MAX_BODY = 1 << 20  # bytes of a request or a reply; larger ones are not kept
UNCACHED = ("continuous", "sequences")  # schedules whose replies depend on more than the request
OVERHEAD = 512  # bytes of an entry beside its reply, about
# What the connection, proxies and this server use; no answer should depend on it.
TRANSPORT_HEADERS = frozenset(
    (
        *("accept-encoding", "cache-control", "connection", "content-length", "date", "expect", "host"),
        *("idempotency-key", "keep-alive"),
        *("pragma", "trailer", "transfer-encoding", "upgrade", "user-agent", "via"),
        *("baggage", "traceparent", "tracestate", "x-amzn-trace-id", "x-b3-sampled", "x-b3-spanid", "x-b3-traceid"),
        *("x-cloud-trace-context", "x-flambeau-priority", "x-flambeau-timeout", "x-request-id"),
    )
)
Result = Literal["hit", "joined", "miss"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A kept reply."""

    body: bytes
    headers: Sequence[tuple[str, str]]
    kept_at: float
    expires: float

    @property
    def size_bytes(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers) + OVERHEAD

    def to_part(self, job: Job, result: Result, now: float) -> Part:
        age = ("age", str(int(now - self.kept_at)))
        return Part(job.id, self.body, headers=[*self.headers, age, (CACHE_HEADER, result)])


class Computation:
    """A request that is computed, and the same ones that wait for its reply."""

    __slots__ = ("_has_answered", "_is_over", "_receiver", "_settle", "is_abandoned", "key", "reply", "waiting")

    def __init__(self, key: bytes, receiver: Receiver, settle: Callable[[Computation], None]) -> None:
        self.key = key
        self.reply: Part | None = None  # once it is whole
        self.waiting: list[Job] = []
        self.is_abandoned = False  # its reply is not this model's
        self._receiver, self._settle = receiver, settle
        self._has_answered = self._is_over = False

    def on_parts(self, parts: list[Part]) -> None:
        if parts[0].last and not self._has_answered:  # a stream is not kept
            self.reply = parts[0]
        self._has_answered = True
        self._receiver.on_parts(parts)

    def on_error(self, error: FlambeauError) -> None:
        self._has_answered = True
        self._receiver.on_error(error)

    @property
    def is_cancelled(self) -> bool:
        """Whether its client has gone, once it is over: nobody knows what the answer would have been."""
        return not self._has_answered and not self.is_abandoned

    def end(self) -> None:
        """The job is over: its reply comes in a moment, or it has failed, or was cancelled."""
        if not self._is_over:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._settle, self)

    def abandon(self) -> None:
        """No worker of this model takes the job."""
        self.is_abandoned = True
        self.end()


class ResponseCache:
    """The replies of one model, up to a size; those that were not used for longest leave first."""

    def __init__(
        self,
        max_bytes: int,
        max_age_s: float,
        headers: Collection[str] | None,
        *,
        compute: Callable[[Job], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`headers` are those that answers depend on; None: all. `compute` gives a job that has waited to a worker."""
        self._max_age_s, self._headers = max_age_s, headers
        self._compute, self._now = compute, now
        self._kept: KeptReplies[bytes, Entry] = KeptReplies(max_bytes)
        self._running: dict[bytes, Computation] = {}
        self.is_off = False
        self.num_joined = 0  # jobs that wait for the reply of another one
        self.counts: dict[Result, int] = {"hit": 0, "joined": 0, "miss": 0}

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def find(self, job: Job) -> Entry | None:
        """The kept reply to a job; also sets the job's key, if its reply may be kept."""
        directives = cache_directives(job.headers)
        is_small = job.body.size_bytes <= MAX_BODY
        if self.is_off or job.kind not in KINDS or job.is_copy or not is_small or "no-store" in directives:
            return None
        job.cache_key = key_of(job, self._headers)
        entry = None if "no-cache" in directives else self._kept.find(job.cache_key, self._now())
        if entry is not None:
            self._kept.touch(job.cache_key)
        return entry

    def turn_off(self) -> None:
        """Keep nothing any more; those that wait for another's reply are computed."""
        self.is_off = True
        self._kept.clear()

    def answer(self, job: Job, entry: Entry) -> None:
        self.counts["hit"] += 1
        job.deliver([entry.to_part(job, "hit", self._now())])

    def join(self, job: Job) -> bool:
        """Let a job wait if the same one is computed, and say so; otherwise this one is to be computed."""
        if not job.cache_key:
            return False
        computation = self._running.get(job.cache_key)
        if computation is None or "no-cache" in cache_directives(job.headers):
            self.counts["miss"] += 1
            self._begin(job)
            return False
        self.counts["joined"] += 1
        self._wait(computation, job)
        return True

    def _begin(self, job: Job) -> Computation:
        """Let others wait for this job; the reply of the one that they waited for before is too old to be kept."""
        computation = Computation(job.cache_key, job.receiver, self._settle)
        job.receiver = job.computation = self._running[job.cache_key] = computation
        return computation

    def _wait(self, computation: Computation, job: Job) -> None:
        computation.waiting.append(job)
        self.num_joined += 1
        job.on_cancel = partial(self._leave, computation)

    def _leave(self, computation: Computation, job: Job) -> None:
        computation.waiting.remove(job)
        self.num_joined -= 1

    def _settle(self, computation: Computation) -> None:
        is_newest = self._running.get(computation.key) is computation
        if is_newest:
            del self._running[computation.key]
        if computation.is_cancelled and computation.waiting:
            self._replace(computation)
            return
        entry = None if computation.is_abandoned else self._to_entry(computation.reply)
        if entry is not None and is_newest:
            self._kept.keep(computation.key, entry)
        while computation.waiting:
            self._answer_or_compute(self._next(computation), entry)

    def _next(self, computation: Computation) -> Job:
        """The first one that waits, which waits no more."""
        job = computation.waiting[0]
        self._leave(computation, job)
        job.on_cancel = None
        return job

    def _replace(self, cancelled: Computation) -> None:
        """Compute the first one that waits, and let the others wait for that, or for a newer one."""
        newest, first = self._running.get(cancelled.key), None
        if newest is None:
            first = self._next(cancelled)
            newest = self._begin(first)
        while cancelled.waiting:
            self._wait(newest, self._next(cancelled))
        if first is not None:
            self._answer_or_compute(first, None)

    def _answer_or_compute(self, job: Job, entry: Entry | None) -> None:
        """Of a job that has waited. An exception is logged: the others that wait must not suffer."""
        try:
            if entry is None:
                self._compute(job)
            else:
                job.deliver([entry.to_part(job, "joined", self._now())])
        except Exception:
            logger.exception("request %s: it could not be answered", job.request_id, extra=job.log_fields)
            job.cancel()  # without effect on one that is answered
            job.report(JobFailed("The answer could not be delivered.", status=500))  # or the client would wait

    def _to_entry(self, reply: Part | None) -> Entry | None:
        """What is kept of a reply; None: nothing."""
        if self.is_off or reply is None or reply.status != 200 or reply.phrase or len(reply.body) > MAX_BODY:
            return None
        headers = reply.headers or []
        directives = cache_directives(headers)
        age_s = min(self._max_age_s, max_age_of(directives))
        if (
            not {"no-store", "no-cache", "private"}.isdisjoint(directives)
            or age_s <= 0
            or header(headers, "set-cookie")
            or not all(map(self._counts, varying(headers)))
        ):
            return None
        now = self._now()
        return Entry(reply.body, tuple(headers), now, now + age_s)

    def _counts(self, name: str) -> bool:
        """Whether requests with other values of this header are others."""
        return name != "*" and (name not in TRANSPORT_HEADERS if self._headers is None else name in self._headers)


def response_cache(config: ModelConfig, compute: Callable[[Job], None], *, watch: bool) -> ResponseCache | None:
    """The cache that a model's settings ask for; with `watch`, its code may change at any time."""
    if not (config.response_cache_mb and config.response_cache_s) or config.schedule in UNCACHED:
        return None
    if watch:
        logger.warning("responseCacheMb has no effect with --watch: the handler's code may change")
        return None
    return ResponseCache(
        config.response_cache_mb << 20, config.response_cache_s, config.response_cache_headers, compute=compute
    )


def key_of(job: Job, names: Collection[str] | None) -> bytes:
    """A digest of what a handler can see of a job; of the headers only these, or all but those of the transport."""
    headers = [(name.lower(), value) for name, value in job.headers]
    seen = [each for each in headers if (each[0] not in TRANSPORT_HEADERS if names is None else each[0] in names)]
    tenant = job.tenant.name if job.tenant is not None else ""
    about = (job.kind, job.url_path, job.query, job.envelope, job.fields, seen, tenant)
    digest = blake2b(msgspec.msgpack.encode(about), digest_size=32)
    body = job.body
    digest.update(body.content if body.segment is None else body.segment.memory[: body.size_bytes])
    return digest.digest()


def varying(headers: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The headers of its request that a reply depends on, as far as it says so."""
    for name, value in headers:
        if name.lower() == "vary":
            yield from filter(None, (each.strip().lower() for each in value.split(",")))
        elif name.lower() == "content-encoding":
            yield "accept-encoding"


def cache_directives(headers: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """The directives of Cache-Control, and their values."""
    found: dict[str, str] = {}
    for name, value in headers:
        if len(name) == 13 and name.lower() == "cache-control":
            for directive in value.lower().split(","):
                key, _, amount = directive.strip().partition("=")
                found[key] = amount.strip('" ')
    return found


def max_age_of(directives: Mapping[str, str]) -> float:
    """How many seconds a handler allows its reply to be kept."""
    amount = directives.get("max-age", "")
    return float(amount) if amount.isascii() and amount.isdecimal() else float("inf")
