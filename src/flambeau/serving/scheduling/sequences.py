"""Sequences: jobs that depend on those before them, each sequence with a queue of its own, and when it ends."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flambeau.config.server import SequenceHeaders
from flambeau.errors import FlambeauError
from flambeau.serving.job import Job, Receiver
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.scheduling.sequence import Pending, Sequence
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.wire.messages import Part

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """How many sequences live at a time, how many jobs of one may wait, and how long it lives."""

    count: int = 1
    queue_size: int = 1
    idle_s: float
    total_s: float | None = None


# ---- decisions ----


def per_worker(max_sequences: int, min_workers: int) -> int:
    """How many sequences one worker takes."""
    return max(1, max_sequences // max(1, min_workers))


def ends_at(*, started: float, last_active: float, is_busy: bool, limits: SequenceLimits) -> float | None:
    """When a sequence ends by itself; None where nothing but its own jobs or its worker can end it."""
    moments = [] if is_busy else [last_active + limits.idle_s]
    if limits.total_s is not None:
        moments.append(started + limits.total_s)
    return min(moments, default=None)


def value_of(headers: Iterable[tuple[str, str]], name: str) -> str:
    """A header, whatever its case; empty when it is not there."""
    low, size = name.lower(), len(name)
    return next((value.strip() for key, value in headers if len(key) == size and key.lower() == low), "")


def ids_in(value: str) -> list[str]:
    """The sequence ids that the end header of a response names."""
    return [name for part in value.split(";") if (name := part.strip())]


def with_sequence(headers: Headers, names: SequenceHeaders) -> tuple[str, Headers]:
    """A request's sequence and its headers; one that names none opens a new sequence, and its handler is told so."""
    if known := value_of(headers, names.id):
        return known, headers
    new = f"ts-seq-{uuid.uuid4()}"
    ours = {names.id.lower(), names.start.lower()}
    kept = [(name, value) for name, value in headers if name.lower() not in ours]
    return new, [*kept, (names.id, new), (names.start, "true")]


# ---- state ----


class Sequences(JobQueue):
    """The live sequences of one model; what belongs to none waits in the queue that this is, too."""

    def __init__(self, limits: SequenceLimits, names: SequenceHeaders, capacity: int) -> None:
        super().__init__(capacity + limits.count * limits.queue_size)
        self.limits = limits
        self._names = names
        self.pending = Pending()
        self.num_of: Counter[RemoteWorker] = Counter()  # live sequences of each worker
        self._live: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return super().__len__() + self.pending.num_jobs

    def live(self) -> list[Sequence]:
        """The sequences there are, in the order in which they came."""
        return [*self._live.values()]

    @property
    def num_lone(self) -> int:
        """Jobs that belong to no sequence."""
        return super().__len__()

    def find(self, headers: Headers) -> Sequence | None:
        """The live sequence that a request names."""
        return self._live.get(value_of(headers, self._names.id))

    def refusal(self, headers: Headers) -> str:
        """Why a job with these headers cannot be taken; empty when it can."""
        sequence = self.find(headers)
        if sequence is None and len(self._live) >= self.limits.count:
            return f"{len(self._live)} sequences are open, as many as maxNumSequence allows."
        if sequence is not None and len(sequence.waiting) >= self.limits.queue_size:
            return f"{len(sequence.waiting)} requests of this sequence wait, as many as maxSequenceJobQueueSize allows."
        return ""

    def put_in_sequence(self, job: Job, now: float) -> Sequence:
        """Add a job to its sequence, which is opened with it when there is none."""
        id, job.headers = with_sequence(job.headers, self._names)
        sequence = self._live.get(id)
        if sequence is None:
            sequence = self._live[id] = Sequence(id, now, self.pending)
        sequence.last_active = now
        sequence.put(job)
        return sequence

    def on_reply(self, sequence: Sequence, parts: list[Part], now: float) -> list[Sequence]:
        """A job of a sequence is being answered: which sequences its headers end."""
        sequence.last_active = now
        ended = []
        for part in parts:
            if part.headers and (value := value_of(part.headers, self._names.end)):
                ended += [found for id in ids_in(value) if (found := self._live.get(id))]
        return ended

    def overdue(self, now: float) -> list[Sequence]:
        """The sequences whose time has come."""
        return [sequence for sequence in self.live() if self._is_overdue(sequence, now)]

    def _is_overdue(self, sequence: Sequence, now: float) -> bool:
        """Whether its time has come."""
        moment = ends_at(
            started=sequence.started,
            last_active=sequence.last_active,
            is_busy=sequence.is_busy,
            limits=self.limits,
        )
        return moment is not None and now >= moment

    def assign(self, sequence: Sequence, worker: RemoteWorker) -> None:
        """A sequence stays with that worker from now on."""
        sequence.assign(worker)
        self.num_of[worker] += 1

    def end(self, sequence: Sequence) -> list[Job]:
        """Forget a sequence; return the jobs that waited in it."""
        if self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]
            if (worker := sequence.worker) is not None:
                self.num_of[worker] -= 1
                if not self.num_of[worker]:
                    del self.num_of[worker]  # workers come and go
        return sequence.clear()

    def take_all(self) -> list[Job]:
        """End every sequence, and empty the queue."""
        return [*super().take_all(), *(job for sequence in self.live() for job in self.end(sequence))]


OnReply = Callable[[Sequence, list[Part]], None]


class SequenceReceiver:
    """Stands before a job's receiver, so that its sequence knows of the replies."""

    __slots__ = ("_on_reply", "_receiver", "_sequence")

    def __init__(self, receiver: Receiver, sequence: Sequence, on_reply: OnReply) -> None:
        self._receiver = receiver
        self._sequence = sequence
        self._on_reply = on_reply

    def on_parts(self, parts: list[Part]) -> None:
        """Take the next parts."""
        self._on_reply(self._sequence, parts)
        self._receiver.on_parts(parts)

    def on_error(self, error: FlambeauError) -> None:
        """The job failed."""
        self._on_reply(self._sequence, [])
        self._receiver.on_error(error)
