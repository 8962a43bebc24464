"""Mirror: copies of a model's requests for another version, whose answers are compared and sent to nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from random import randrange
from typing import Any

from flambeau.errors import FlambeauError, JobFailed
from flambeau.serving.job import LOW, Job, Receiver
from flambeau.wire.generation import decode_pieces
from flambeau.wire.messages import Kind, Part
from flambeau.wire.trace_context import TRACEPARENT

logger = logging.getLogger(__name__)

KINDS: frozenset[Kind] = frozenset(("predict", "explain", "generate"))
MAX_BYTES = 256 << 10  # of an answer; larger ones are not compared
SMALL_BYTES = 8 << 10  # larger answers are compared in a thread
MAX_COMPARING = 1  # answers in threads: they and the event loop take turns
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # numbers that differ by no more are equal
KEPT = 10  # differences
SHOWN = 80  # characters of a value
MAX_DIFFERENCE = 300  # characters


class Answer:
    """The parts of one reply; `error` instead, if it failed."""

    __slots__ = ("bodies", "error", "is_over", "size_bytes", "status")

    def __init__(self) -> None:
        self.status = 0
        self.error = ""
        self.bodies: list[bytes] = []
        self.size_bytes = 0
        self.is_over = False

    def add(self, parts: list[Part]) -> None:
        self.status = self.status or parts[0].status
        self.size_bytes += sum(len(part.body) for part in parts)
        if self.size_bytes <= MAX_BYTES:
            self.bodies += [part.body for part in parts]
        else:
            self.bodies.clear()
        self.is_over = parts[-1].last

    def fail(self, error: FlambeauError) -> None:
        status = f" {error.status}" if isinstance(error, JobFailed) else ""
        self.error, self.is_over = f"{type(error).__name__}{status}: {error}", True


class Comparison:
    """The answer of a client's request and that of its copy, until both are there."""

    __slots__ = ("_copy", "_mirror", "kind", "other", "own", "request_id")

    def __init__(self, mirror: Mirror, job: Job) -> None:
        self.own, self.other = Answer(), Answer()
        self.request_id, self.kind = job.request_id, job.kind
        self._mirror: Mirror | None = mirror
        self._copy: Job | None = None

    def begin(self, copy: Job) -> None:
        self._copy = copy

    def on_copy_over(self) -> None:
        """The copy is answered, or its answer is too large."""
        copy, self._copy = self._copy, None
        if copy is not None and self._mirror is not None:
            copy.cancel()  # without effect on one that is answered
            self._mirror.running.discard(copy)
        self.check()

    def check(self) -> None:
        """Compare the answers if both are there, or cannot be compared."""
        if self.other.size_bytes > MAX_BYTES or (self.own.is_over and self.other.is_over):
            mirror, self._mirror = self._mirror, None
            if mirror is not None:
                mirror.settle(self)


class WatchedReceiver:
    """The receiver of a client's request that was copied."""

    __slots__ = ("_comparison", "_receiver")

    def __init__(self, receiver: Receiver, comparison: Comparison) -> None:
        self._receiver, self._comparison = receiver, comparison

    def on_parts(self, parts: list[Part]) -> None:
        self._comparison.own.add(parts)  # first: the receiver may change them
        self._receiver.on_parts(parts)
        if parts[-1].last:
            self._comparison.check()

    def on_error(self, error: FlambeauError) -> None:
        self._comparison.own.fail(error)
        self._receiver.on_error(error)
        self._comparison.check()


class CopyReceiver:
    """The receiver of a copy."""

    __slots__ = ("_comparison",)

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def on_parts(self, parts: list[Part]) -> None:
        self._comparison.other.add(parts)
        if parts[-1].last or self._comparison.other.size_bytes > MAX_BYTES:
            self._comparison.on_copy_over()

    def on_error(self, error: FlambeauError) -> None:
        self._comparison.other.fail(error)
        self._comparison.on_copy_over()


class Mirror:
    """Copies a percentage of the requests. A copy waits behind all other requests and is not retried."""

    def __init__(self, add: Callable[[Job], None], has_room: Callable[[], bool]) -> None:
        """`add` accepts a job for the version that gets the copies, or raises; `has_room` says whether to try."""
        self.percent = 0
        self.running: set[Job] = set()
        self._add, self._has_room = add, has_room
        self._num_comparing = 0
        # How many copies were accepted, and what came of them. The others run, or their clients have gone.
        self.counts = dict.fromkeys(("mirrored", "equal", "different", "failed", "dropped"), 0)
        self.differences: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def copy(self, job: Job) -> None:
        """Mirror a job that was accepted, if it is one of the percentage."""
        if job.kind not in KINDS or job.is_over or randrange(100) >= self.percent:
            return
        try:
            self._copy(job)
        except Exception:  # the client's own request goes on
            logger.exception("request %s: it could not be mirrored", job.request_id, extra=job.log_fields)

    def _copy(self, job: Job) -> None:
        if not self._has_room():
            self.counts["dropped"] += 1
            return
        comparison = Comparison(self, job)
        copy = Job(
            CopyReceiver(comparison),
            request_id=job.request_id,
            headers=[each for each in job.headers if each[0].lower() != TRACEPARENT],
            body=job.body,
            arrived=time.monotonic(),
            kind=job.kind,
            url_path=job.url_path,
            query=job.query,
            envelope=job.envelope,
            fields=job.fields,
        )
        copy.is_copy, copy.priority = True, LOW
        job.body.hold()
        try:
            self._add(copy)
        except Exception as error:
            job.body.release()
            self.counts["dropped"] += 1
            if not isinstance(error, FlambeauError):
                raise
            return
        self.counts["mirrored"] += 1
        job.receiver = WatchedReceiver(job.receiver, comparison)
        if not copy.is_over:
            self.running.add(copy)
            comparison.begin(copy)

    def close(self) -> None:
        """Copy nothing more, and cancel what runs."""
        self.percent = 0
        running, self.running = self.running, set()
        for copy in running:
            copy.cancel()

    def settle(self, comparison: Comparison) -> None:
        """Compare two answers, soon: the client's own comes first."""
        size_bytes = max(comparison.own.size_bytes, comparison.other.size_bytes)
        loop = asyncio.get_running_loop()
        if size_bytes > MAX_BYTES or (size_bytes > SMALL_BYTES and self._num_comparing >= MAX_COMPARING):
            self.counts["dropped"] += 1
        elif size_bytes <= SMALL_BYTES:
            loop.call_soon(lambda: self._note(comparison, compare(comparison)))
        else:
            self._num_comparing += 1
            comparing = loop.run_in_executor(None, compare, comparison)
            comparing.add_done_callback(lambda done: self._compared(comparison, done))

    def _compared(self, comparison: Comparison, done: asyncio.Future[str]) -> None:
        self._num_comparing -= 1
        if not done.cancelled():
            self._note(comparison, done.result())

    def _note(self, comparison: Comparison, difference: str) -> None:
        has_failed = comparison.other.error and not comparison.own.error
        result = "equal" if not difference else "failed" if has_failed else "different"
        self.counts[result] += 1
        if difference:
            found = {"requestId": comparison.request_id, "at": round(time.time(), 3), "result": result}
            self.differences.append({**found, "difference": difference[:MAX_DIFFERENCE]})


def compare(comparison: Comparison) -> str:
    """What differs in the answer of the copy; empty: nothing."""
    own, other = comparison.own, comparison.other
    if own.error or other.error:
        same = own.error.partition(":")[0] == other.error.partition(":")[0]
        return "" if same else f"{own.error or f'status {own.status}'}, not {other.error or f'status {other.status}'}"
    if own.status != other.status:
        return f"status {own.status}, not {other.status}"
    if comparison.kind == "generate":
        return difference_of(texts_of(own.bodies), texts_of(other.bodies))
    one, another = b"".join(own.bodies), b"".join(other.bodies)
    if one == another:
        return ""
    try:
        return difference_of(json.loads(one), json.loads(another))
    except (ValueError, RecursionError, OverflowError):  # not JSON, or nothing that can be compared
        place = next((i for i, (a, b) in enumerate(zip(one, another, strict=False)) if a != b), None)
        place = min(len(one), len(another)) if place is None else place
        return f"byte {place}: {shown(one[place : place + SHOWN])}, not {shown(another[place : place + SHOWN])}"


def texts_of(bodies: list[bytes]) -> dict[str, str]:
    """The texts of a generation by their choice, with what the model thought and called, and how they ended."""
    texts: dict[str, str] = {}
    for piece in (piece for body in bodies if body for piece in decode_pieces(body)):
        calls = "".join(call.name + call.arguments for call in piece.calls)
        ended = f" [{piece.finish_reason}]" if piece.finish_reason else ""
        name = str(piece.index)
        texts[name] = texts.get(name, "") + piece.reasoning + piece.text + calls + ended
    return texts


def difference_of(own: Any, other: Any, place: str = "") -> str:
    """The first difference of two JSON values, with its place; numbers may differ a little, unless both are whole."""
    if isinstance(own, dict) and isinstance(other, dict) and own.keys() == other.keys():
        pairs = [(name, value, other[name]) for name, value in own.items()]
        if not place:  # KServe's second protocol names the version
            pairs = [pair for pair in pairs if pair[0] != "model_version"]
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(own, other, strict=True))]
    else:
        return "" if is_equal(own, other) else f"{place or 'the answer'}: {shown(own)}, not {shown(other)}"
    found = (difference_of(value, another, f"{place}.{name}" if place else name) for name, value, another in pairs)
    return next(filter(None, found), "")


def is_equal(own: Any, other: Any) -> bool:
    """Whether two values without parts are equal."""
    if {type(own), type(other)} in ({float}, {float, int}):
        return math.isclose(own, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (own != own and other != other)
    return type(own) is type(other) and bool(own == other)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
