"""BatchDispatcher: sends independent jobs in batches. CpuContention: limits busy workers to the cores."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from flambeau.metrics.traffic import smoothed
from flambeau.serving.job import Job
from flambeau.serving.scheduling.batch_policy import BatchLimits, free_places, held_tenants, may_send_ahead, wait_s
from flambeau.serving.scheduling.dispatcher import NO_TICKET, Timer, Worker
from flambeau.serving.scheduling.prefix_affinity import PrefixAffinity
from flambeau.serving.scheduling.queue import JobQueue

STUCK_S = 0.05  # a worker without progress for this long returns the batches that it has not begun
# Shares of its busy time in which a worker's main thread runs or waits for a core.
CPU_BOUND_FROM = 0.7
SLEEPING_BELOW = 0.3


class BatchDispatcher:
    """Sends a batch whenever there is one to send and a worker that can take it."""

    def __init__(
        self,
        queue: JobQueue,
        workers: Sequence[Worker],
        limits: BatchLimits,
        *,
        num_cores: int,
        needs_ticket: bool = False,
    ) -> None:
        self._queue = queue
        self._workers = workers
        self._limits = limits
        self._num_cores = num_cores
        self._needs_ticket = needs_ticket
        self._loop = asyncio.get_running_loop()
        self._timer = Timer(self.feed)  # the oldest job has waited long enough for a fuller batch
        self._will_feed = False
        self._held_since = 0.0  # a worker is free from then on, and the next batch waits for more jobs; 0: it does not
        self._contention: CpuContention | None = None  # with more workers than cores
        self._affinity = PrefixAffinity()

    def add(self, job: Job) -> str:
        """Queue a job. Jobs that arrive in one iteration of the event loop leave together when the model batches."""
        if job.kind == "tokenize" and (worker := self._tokenizer()) is not None:
            worker.send([job])
            return ""
        if self._needs_ticket and not self._has_ticket():
            return NO_TICKET
        self._queue.put(job)
        if self._limits.size == 1:
            self.feed()
        elif not self._will_feed:
            self._will_feed = True
            self._loop.call_soon(self._feed_soon)
        return ""

    def _tokenizer(self) -> Worker | None:
        """A worker that generates step by step: it tokenizes between two steps, however many jobs it has."""
        workers = [worker for worker in self._workers if worker.places and worker.is_ready and not worker.is_retiring]
        return min(workers, key=lambda worker: len(worker.batches), default=None)

    def _has_ticket(self) -> bool:
        return sum(free_places(worker, self._limits) for worker in self._workers) > len(self._queue)

    def _feed_soon(self) -> None:
        self._will_feed = False
        self.feed()

    def feed(self) -> None:
        queue, limits = self._queue, self._limits
        while num_waiting := len(queue):
            if len(queue.last_arrivals) > 1:
                queue.held = self._held()
                if not queue.has_next:
                    return
            worker = self._pick(num_waiting)
            if worker is None:
                self._held_since = 0.0
                return
            if worker.places:  # jobs join a running batch one by one, without a delay
                if len(self._workers) > 1:
                    worker = self._prefer(worker)
                worker.send(queue.take(1))
                continue
            if limits.delay_s is not None and not queue.oldest.is_alone:
                wait = wait_s(num_waiting, self._loop.time() - queue.oldest.arrived, limits)
                if wait > 0:
                    self._held_since = self._held_since or time.monotonic()
                    self._timer.start(wait)
                    return
            worker.send(queue.take(limits.size), self._held_since)
            self._held_since = 0.0

    def _held(self) -> Collection[str]:
        """Tenants whose jobs wait, so that others find a place."""
        workers = [worker for worker in self._workers if worker.places and worker.is_ready and not worker.is_retiring]
        running: Counter[str] = Counter()
        for worker in workers:
            running.update(worker.tenants)
        num_places = sum(worker.places for worker in workers)
        return held_tenants(num_places, running, self._queue.last_arrivals, self._loop.time())

    def _pick(self, num_waiting: int) -> Worker | None:
        """The least busy worker that can take another batch."""
        best: Worker | None = None
        may_use_idle = self._contention is None or not self._has_contention(self._contention)
        for worker in self._workers:
            if not worker.is_ready or worker.is_retiring:
                continue
            load = len(worker.batches)
            if not load:
                if may_use_idle:
                    return worker
                continue
            if best is not None and load >= len(best.batches):
                continue
            if self._may_send_beside(worker) if worker.is_concurrent else self._may_send_ahead(worker, num_waiting):
                best = worker
        return best

    def _prefer(self, least_busy: Worker) -> Worker:
        """The worker that holds the beginning of the next job's prompt, or else the least busy one."""
        job = self._queue.oldest
        if job.is_suspect:
            return least_busy
        others = [worker for worker in self._workers if worker is not least_busy and self._may_join(worker)]
        return self._affinity.pick([least_busy, *others], job)

    def _may_join(self, worker: Worker) -> bool:
        """Whether a worker that takes jobs one by one could take the next one."""
        if not worker.is_ready or worker.is_retiring or not worker.places:
            return False
        if not worker.batches:
            return self._contention is None or not self._has_contention(self._contention)
        return self._may_send_beside(worker)

    def _has_contention(self, contention: CpuContention) -> bool:
        """Whether as many workers compute as there are cores for them."""
        limit = contention.limit
        if limit is None:
            return False
        return (
            sum(bool(worker.batches) and worker.local_pid not in contention.sleeping for worker in self._workers)
            >= limit
        )

    def _may_send_beside(self, worker: Worker) -> bool:
        """Whether a concurrent worker may get one more job; a job suspected of a crash runs alone."""
        is_full = len(worker.batches) >= (worker.places or self._limits.concurrency)
        return not (is_full or worker.has_suspect or self._queue.oldest.is_suspect)

    def _may_send_ahead(self, worker: Worker, num_waiting: int) -> bool:
        if worker.depth > 1 and (worker.has_suspect or self._queue.oldest.is_suspect):
            return False
        return may_send_ahead(
            num_waiting,
            len(worker.batches),
            worker.service_s,
            self._limits,
            is_only_worker=len(self._workers) == 1,
            depth=worker.depth,
        )

    def tick(self) -> None:
        """Measure CPU contention and move jobs away from stuck workers."""
        self._sample_contention()
        self._free_stuck_jobs()

    def _sample_contention(self) -> None:
        if len(self._workers) <= self._num_cores:
            self._contention = None
            return
        self._contention = self._contention or CpuContention(self._num_cores)
        self._contention.sample(self._workers)
        self.feed()

    def _free_stuck_jobs(self) -> None:
        """Give jobs that wait behind a stuck batch to an idle worker."""
        if len(self._workers) < 2 or self._queue or not any(worker.is_idle for worker in self._workers):
            return
        for worker in self._workers:
            if worker.num_batches > 1 and worker.seconds_without_progress() > STUCK_S:
                for job in reversed(worker.take_back()):
                    self._queue.put_back(job)
        self.feed()

    def on_worker_exit(self) -> None:
        self._affinity.keep([worker for worker in self._workers if worker.is_ready])
        self.feed()

    def end_sequence(self, id: str) -> None:
        """There are none."""

    def close(self) -> None:
        self._timer.cancel()


class BusyWorker(Protocol):
    """The part of a worker that CPU contention needs."""

    @property
    def local_pid(self) -> int: ...

    @property
    def num_batches(self) -> int: ...


class CpuContention:
    """Samples the CPU time of a model's busy workers. `limit` is how many of them should be busy at a time."""

    def __init__(self, num_cores: int, read_cpu_s: Callable[[int], float | None] | None = None) -> None:
        self._num_cores = num_cores
        self._read_cpu_s = read_cpu_s or runnable_s
        self._samples: dict[int, tuple[float, float]] = {}  # pid → time of the sample, CPU time until then
        self._share: float | None = None
        self.sleeping: frozenset[int] = frozenset()  # pids that are busy without using a core

    @property
    def limit(self) -> int | None:
        """How many CPU-bound workers may be busy; None: no limit."""
        return self._num_cores if self._share is not None and self._share >= CPU_BOUND_FROM else None

    def sample(self, workers: Iterable[BusyWorker], now: float | None = None) -> None:
        """Measure the workers that have been busy since the last sample."""
        now = time.monotonic() if now is None else now
        samples, shares = {}, {}
        for worker in workers:
            cpu_s = self._read_cpu_s(worker.local_pid) if worker.num_batches else None
            if cpu_s is None:
                continue
            samples[worker.local_pid] = (now, cpu_s)
            if worker.local_pid in self._samples and now > self._samples[worker.local_pid][0]:
                before, cpu_s_before = self._samples[worker.local_pid]
                shares[worker.local_pid] = min(1.0, max(0.0, cpu_s - cpu_s_before) / (now - before))
        self._samples = samples
        self.sleeping = frozenset(pid for pid, share in shares.items() if share < SLEEPING_BELOW)
        for share in shares.values():
            self._share = smoothed(self._share, share)


def runnable_s(pid: int) -> float | None:
    """How long the main thread of a process has run or waited for a core; None if the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran_ns, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(ran_ns) + int(waited_ns)) / 1e9
