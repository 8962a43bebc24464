from __future__ import annotations

from dataclasses import dataclass

from flambeau.serving.scheduling.crowding import Crowd, wanted_cpu_s


@dataclass
class Worker:
    pid: int
    num_batches: int = 1
    cpu_s: float = 0.0


class Watch:
    """A crowd on two cores, with a clock of its own."""

    def __init__(self, *workers):
        self.workers = workers
        self.now = 0.0
        self.crowd = Crowd(2, lambda pid: next(w.cpu_s for w in workers if w.pid == pid))
        self.crowd.look(workers, self.now)

    def pass_time(self, *shares):
        self.now += 0.1
        for worker, share in zip(self.workers, shares, strict=True):
            worker.cpu_s += 0.1 * share
        self.crowd.look(self.workers, self.now)


def test_nothing_is_limited_before_anything_is_known():
    assert Crowd(2).limit is None


def test_workers_that_compute_are_limited_to_the_cores():
    watch = Watch(Worker(1), Worker(2), Worker(3))
    watch.pass_time(1.0, 0.9, 0.95)
    assert watch.crowd.limit == 2
    assert watch.crowd.sleeping == frozenset()


def test_workers_that_wait_for_something_else_are_not():
    watch = Watch(Worker(1), Worker(2), Worker(3))
    watch.pass_time(0.05, 0.1, 0.02)
    assert watch.crowd.limit is None


def test_one_that_sleeps_among_those_that_compute_takes_nobodys_place():
    watch = Watch(Worker(1), Worker(2), Worker(3))
    watch.pass_time(1.0, 1.0, 1.0)
    watch.pass_time(1.0, 0.0, 1.0)
    assert watch.crowd.limit == 2
    assert watch.crowd.sleeping == {2}


def test_idle_workers_say_nothing():
    idle = Worker(1, num_batches=0)
    watch = Watch(idle, Worker(2))
    watch.pass_time(0.0, 1.0)
    assert watch.crowd.limit == 2
    assert watch.crowd.sleeping == frozenset()


def test_own_process_has_used_a_core():
    import os

    before = wanted_cpu_s(os.getpid())
    total = sum(i * i for i in range(200_000))
    assert total > 0
    if before is not None:  # a kernel without such figures limits nobody
        assert wanted_cpu_s(os.getpid()) > before
    assert wanted_cpu_s(-1) is None
