"""Who gets the next job."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.serving.scheduling.batch_dispatcher import BatchDispatcher, CpuContention, runnable_s
from flambeau.serving.scheduling.batch_policy import BatchLimits
from flambeau.serving.scheduling.queue import JobQueue
from support.jobs import new_job, new_worker


def sent_to(*workers, limits, num_jobs):
    """How many jobs each message has brought to each worker."""
    queue = JobQueue(100)
    dispatcher = BatchDispatcher(queue, [*workers], limits, num_cores=4)
    for _ in range(num_jobs):
        queue.put(new_job())
    dispatcher.feed()
    dispatcher.close()
    return [[len(run.jobs) for run in worker._channel.sent] for worker in workers], len(queue)


async def test_worker_that_generates_gets_jobs_one_by_one_at_once_and_no_more_than_it_has_places():
    worker = new_worker(is_concurrent=True, places=3)
    limits = BatchLimits(size=8, delay_s=60.0, concurrency=64)
    assert sent_to(worker, limits=limits, num_jobs=5) == ([[1, 1, 1]], 2)


async def test_two_workers_that_generate_share_the_jobs():
    workers = [new_worker(is_concurrent=True, places=3) for _ in range(2)]
    assert sent_to(*workers, limits=BatchLimits(), num_jobs=5) == ([[1, 1, 1], [1, 1]], 0)


@dataclass
class Worker:
    local_pid: int
    num_batches: int = 1
    cpu_s: float = 0.0


class Samples:
    """Two cores, with a clock of their own."""

    def __init__(self, *workers):
        self.workers = workers
        self.now = 0.0
        self.contention = CpuContention(2, lambda pid: next(w.cpu_s for w in workers if w.local_pid == pid))
        self.contention.sample(workers, self.now)

    def pass_time(self, *shares):
        self.now += 0.1
        for worker, share in zip(self.workers, shares, strict=True):
            worker.cpu_s += 0.1 * share
        self.contention.sample(self.workers, self.now)


def test_nothing_is_limited_before_anything_is_known():
    assert CpuContention(2).limit is None


def test_workers_that_compute_are_limited_to_the_cores():
    samples = Samples(Worker(1), Worker(2), Worker(3))
    samples.pass_time(1.0, 0.9, 0.95)
    assert samples.contention.limit == 2
    assert samples.contention.sleeping == frozenset()


def test_workers_that_wait_for_something_else_are_not():
    samples = Samples(Worker(1), Worker(2), Worker(3))
    samples.pass_time(0.05, 0.1, 0.02)
    assert samples.contention.limit is None


def test_one_that_sleeps_among_those_that_compute_takes_no_place():
    samples = Samples(Worker(1), Worker(2), Worker(3))
    samples.pass_time(1.0, 1.0, 1.0)
    samples.pass_time(1.0, 0.0, 1.0)
    assert samples.contention.limit == 2
    assert samples.contention.sleeping == {2}


def test_idle_workers_say_nothing():
    idle = Worker(1, num_batches=0)
    samples = Samples(idle, Worker(2))
    samples.pass_time(0.0, 1.0)
    assert samples.contention.limit == 2
    assert samples.contention.sleeping == frozenset()


def test_own_process_has_used_a_core():
    import os

    before = runnable_s(os.getpid())
    total = sum(i * i for i in range(200_000))
    assert total > 0
    if before is not None:  # a kernel without such figures limits nobody
        assert runnable_s(os.getpid()) > before
    assert runnable_s(-1) is None
