"""The jobs a worker holds: which are begun, who is to blame, and what is counted as waiting."""

from __future__ import annotations

import pytest

from flambeau.metrics.traffic import HostTraffic, ModelTraffic
from flambeau.serving.workers.holding import Holding
from support.jobs import new_job


@pytest.fixture
def traffic():
    return ModelTraffic("m", HostTraffic())


@pytest.fixture
def held(traffic):
    return Holding(traffic)


def add(held, *sizes, now=0.0):
    batches = []
    for size in sizes:
        jobs = [new_job() for _ in range(size)]
        batches.append((held.add(jobs, now), jobs))
    return batches


def finish(held, entry, now=0.0):
    batch, jobs = entry
    return [held.finish(job.id, batch, now) for job in jobs]


def test_jobs_sent_ahead_are_waiting_until_their_batch_begins(held, traffic):
    first, second, third = add(held, 2, 3, 1)
    assert traffic.num_ahead == 4
    assert finish(held, first) == [False, True]
    assert traffic.num_ahead == 1
    finish(held, second)
    assert traffic.num_ahead == 0
    finish(held, third)
    assert traffic.num_ahead == 0
    assert not held.batches
    assert not held.jobs


def test_worker_that_prepares_the_next_batch_has_begun_two(held, traffic):
    held.depth = 2
    first, second, third = add(held, 1, 1, 5)
    assert traffic.num_ahead == 5
    finish(held, second)
    assert traffic.num_ahead == 0
    finish(held, first)
    finish(held, third)
    assert traffic.num_ahead == 0


def test_concurrent_worker_has_begun_whatever_it_holds(held, traffic):
    held.is_concurrent = True
    add(held, 1, 1, 1)
    assert traffic.num_ahead == 0
    suspects, innocent = held.part()
    assert [company for _, company in suspects] == [3, 3, 3]
    assert innocent == []


def test_batch_that_was_cancelled_before_it_began_changes_nothing_for_the_running_one(held, traffic):
    running, ahead = add(held, 1, 2)
    assert finish(held, ahead, now=7.0) == [False, True]
    assert traffic.num_ahead == 0
    assert running[0].started == 0.0
    assert held.seconds_without_progress(9.0) == 9.0


def test_next_batch_begins_when_the_one_before_it_ends(held):
    first, second = add(held, 1, 1)
    finish(held, first, now=5.0)
    assert (second[0].started, second[0].progress) == (5.0, 5.0)
    assert held.seconds_without_progress(6.0) == 1.0


def test_dead_workers_jobs_are_suspects_if_begun_and_innocent_if_not(held, traffic):
    (_, begun), (_, waiting) = add(held, 2, 2)
    begun[0].cancel()
    suspects, innocent = held.part()
    assert suspects == [(begun[1], 2)]
    assert innocent == waiting
    assert traffic.num_ahead == 0
    assert held.part() == ([], [])


def test_what_is_not_begun_can_be_taken_back(held):
    (_, begun), (batch, waiting) = add(held, 1, 2)
    old = [job.id for job in waiting]
    waiting[0].cancel()
    assert held.take_back() == {old[1]: waiting[1]}
    assert waiting[1].id != old[1]
    assert held.take_back() == {}
    assert [held.finish(job_id, batch, 0.0) for job_id in old] == [False, True]
    assert [job for job, _ in held.part()[0]] == begun


def test_only_those_who_are_silent_are_to_blame(held):
    held.is_concurrent = True
    [(_, [silent])] = add(held, 1)
    [(_, [fresh])] = add(held, 1, now=8.0)
    assert held.seconds_without_progress(9.0) == 9.0
    held.blame_silent(5.0, 9.0)
    assert (silent.crashes, fresh.crashes) == (1, 0)
    held.speaks_for_all = True
    held.heard_at = 8.5
    assert held.seconds_without_progress(9.0) == 0.5
    held.blame_silent(5.0, 9.0)
    assert silent.crashes == 1
