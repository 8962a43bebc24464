"""Sessions: the open sequences of a stateful model, their queues and their ends.

Clients and settings call a session a sequence: its requests depend on each other and run on one worker.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flambeau.config.server import SequenceHeaders
from flambeau.errors import FlambeauError
from flambeau.serving.job import Job, Receiver
from flambeau.serving.scheduling.dispatcher import Worker
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.wire.messages import Part

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How many sessions are open at a time, how many jobs of one may wait, and how long it lives."""

    count: int = 1
    queue_size: int = 1
    idle_s: float
    total_s: float | None = None


# ---- decisions ----


def sessions_per_worker(max_sessions: int, min_workers: int) -> int:
    return max(1, max_sessions // max(1, min_workers))


def ends_at(*, started: float, last_active: float, is_busy: bool, limits: SessionLimits) -> float | None:
    """When a session expires; None if it does not."""
    moments = [] if is_busy else [last_active + limits.idle_s]
    if limits.total_s is not None:
        moments.append(started + limits.total_s)
    return min(moments, default=None)


def value_of(headers: Iterable[tuple[str, str]], name: str) -> str:
    """A header, whatever its case; empty if it is missing."""
    low, size = name.lower(), len(name)
    return next((value.strip() for key, value in headers if len(key) == size and key.lower() == low), "")


def ids_in(value: str) -> list[str]:
    """The session ids in the end header of a response, separated by semicolons."""
    return [name for part in value.split(";") if (name := part.strip())]


def with_session(headers: Headers, names: SequenceHeaders) -> tuple[str, Headers]:
    """A request's session id and its headers; a request without an id gets the headers of a new session."""
    if known := value_of(headers, names.id):
        return known, headers
    new = f"ts-seq-{uuid.uuid4()}"
    ours = {names.id.lower(), names.start.lower()}
    kept = [(name, value) for name, value in headers if name.lower() not in ours]
    return new, [*kept, (names.id, new), (names.start, "true")]


# ---- state ----


class Session:
    """One session: its waiting jobs, its sent jobs and the worker that holds its state."""

    def __init__(self, id: str, now: float, pending: Pending) -> None:
        self.id = id
        self.started = now
        self.last_active = now
        self.worker: Worker | None = None
        self.waiting: OrderedDict[int, Job] = OrderedDict()
        self._sent: list[Job] = []
        self._pending = pending

    @property
    def first(self) -> Job:
        """The job that leaves next."""
        return next(iter(self.waiting.values()))

    @property
    def is_busy(self) -> bool:
        self._sent = [job for job in self._sent if not job.is_over]
        return bool(self.waiting or self._sent)

    @property
    def may_send(self) -> bool:
        """Whether its next job may leave: never in one batch with the job before it."""
        return bool(self.waiting) and all(job.started or job.is_over for job in self._sent)

    def put(self, job: Job) -> None:
        job.on_cancel = self.remove
        self.waiting[job.id] = job
        self._pending.add(self)

    def take(self) -> Job:
        """Remove the next job, to send it."""
        job = self.waiting.popitem(last=False)[1]
        self._pending.remove(self)
        self._sent = [*(sent for sent in self._sent if not sent.is_over), job]
        return job

    def remove(self, job: Job) -> None:
        """Drop a job that was cancelled or has expired."""
        if self.waiting.pop(job.id, None) is not None:
            self._pending.remove(self)

    def clear(self) -> list[Job]:
        """Remove and return all waiting jobs."""
        jobs = [*self.waiting.values()]
        self.waiting.clear()
        self._pending.remove(self, len(jobs))
        return jobs

    def assign(self, worker: Worker) -> None:
        self._pending.move(self, worker)
        self.worker = worker


class Pending:
    """The sessions with waiting jobs, by worker (None: not assigned), and the number of those jobs."""

    def __init__(self) -> None:
        self.num_jobs = 0
        self._of: defaultdict[Worker | None, dict[Session, None]] = defaultdict(dict)  # in order of arrival

    def of(self, worker: Worker | None) -> list[Session]:
        return [*self._of[worker]] if worker in self._of else []

    def add(self, session: Session) -> None:
        """Count one more job of this session."""
        self.num_jobs += 1
        self._of[session.worker][session] = None

    def remove(self, session: Session, num_jobs: int = 1) -> None:
        self.num_jobs -= num_jobs
        if not session.waiting:
            self._drop(session)

    def move(self, session: Session, worker: Worker) -> None:
        self._drop(session)
        if session.waiting:
            self._of[worker][session] = None

    def _drop(self, session: Session) -> None:
        sessions = self._of[session.worker]
        sessions.pop(session, None)
        if not sessions:
            del self._of[session.worker]  # or exited workers would stay as keys


class Sessions(JobQueue):
    """The open sessions of one model. As a queue it also holds the jobs that belong to no session."""

    def __init__(self, limits: SessionLimits, names: SequenceHeaders, capacity: int) -> None:
        super().__init__(capacity + limits.count * limits.queue_size)
        self.limits = limits
        self._names = names
        self.pending = Pending()
        self.num_of: Counter[Worker] = Counter()  # open sessions of each worker
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return super().__len__() + self.pending.num_jobs

    def all(self) -> list[Session]:
        """The open sessions, oldest first."""
        return [*self._open.values()]

    @property
    def num_lone(self) -> int:
        """Waiting jobs that belong to no session."""
        return super().__len__()

    def find(self, headers: Headers) -> Session | None:
        """The open session that a request names."""
        return self._open.get(value_of(headers, self._names.id))

    def named(self, id: str) -> Session | None:
        return self._open.get(id)

    def rejection(self, headers: Headers) -> str:
        """Why a job with these headers is rejected; empty if it is not."""
        session = self.find(headers)
        if session is None and len(self._open) >= self.limits.count:
            return f"{len(self._open)} sequences are open, as many as maxNumSequence allows."
        if session is not None and len(session.waiting) >= self.limits.queue_size:
            return f"{len(session.waiting)} requests of this sequence wait, as many as maxSequenceJobQueueSize allows."
        return ""

    def put_in_session(self, job: Job, now: float) -> Session:
        """Add a job to its session; open one if needed."""
        id, job.headers = with_session(job.headers, self._names)
        session = self._open.get(id)
        if session is None:
            session = self._open[id] = Session(id, now, self.pending)
        session.last_active = now
        session.put(job)
        return session

    def on_reply(self, session: Session, parts: list[Part], now: float) -> list[Session]:
        """Note the activity of a session; return the sessions that the reply's headers end."""
        session.last_active = now
        ended = []
        for part in parts:
            if part.headers and (value := value_of(part.headers, self._names.end)):
                ended += [found for id in ids_in(value) if (found := self._open.get(id))]
        return ended

    def expired(self, now: float) -> list[Session]:
        """The sessions that have ended by now; one with waiting jobs ends when they are answered."""
        return [session for session in self.all() if not session.waiting and self._has_expired(session, now)]

    def _has_expired(self, session: Session, now: float) -> bool:
        moment = ends_at(
            started=session.started,
            last_active=session.last_active,
            is_busy=session.is_busy,
            limits=self.limits,
        )
        return moment is not None and now >= moment

    def assign(self, session: Session, worker: Worker) -> None:
        """Bind a session to a worker until its end."""
        session.assign(worker)
        self.num_of[worker] += 1

    def end(self, session: Session) -> list[Job]:
        """Close a session; return the jobs that waited in it."""
        if self._open.get(session.id) is session:
            del self._open[session.id]
            if (worker := session.worker) is not None:
                self.num_of[worker] -= 1
                if not self.num_of[worker]:
                    del self.num_of[worker]  # or exited workers would stay as keys
        return session.clear()

    def take_all(self) -> list[Job]:
        """End every session and empty the queue."""
        return [*super().take_all(), *(job for session in self.all() for job in self.end(session))]


class SessionReceiver:
    """Wraps a job's receiver and reports replies to its session."""

    __slots__ = ("_on_reply", "_receiver", "_session")

    def __init__(self, receiver: Receiver, session: Session, on_reply: Callable[[Session, list[Part]], None]) -> None:
        self._receiver = receiver
        self._session = session
        self._on_reply = on_reply

    def on_parts(self, parts: list[Part]) -> None:
        self._on_reply(self._session, parts)
        self._receiver.on_parts(parts)

    def on_error(self, error: FlambeauError) -> None:
        self._on_reply(self._session, [])
        self._receiver.on_error(error)
