"""The jobs a worker holds: which are begun, who is to blame, and what is counted as waiting."""

from __future__ import annotations

import pytest

from flambeau.metrics.traffic import HostTraffic, ModelTraffic
from flambeau.serving.workers.in_flight import InFlight
from support.jobs import new_job


@pytest.fixture
def traffic():
    return ModelTraffic("m", HostTraffic())


@pytest.fixture
def in_flight(traffic):
    return InFlight(traffic)


def add(in_flight, *sizes, now=0.0):
    batches = []
    for size in sizes:
        jobs = [new_job() for _ in range(size)]
        batches.append((in_flight.add(jobs, now), jobs))
    return batches


def finish(in_flight, entry, now=0.0):
    batch, jobs = entry
    return [in_flight.finish(job.id, batch, now) for job in jobs]


def test_nobody_waits_for_copies(in_flight):
    [(_, jobs)] = add(in_flight, 2)
    jobs[0].is_copy = True
    assert in_flight.num_owed == 1


def test_jobs_sent_ahead_are_waiting_until_their_batch_begins(in_flight, traffic):
    first, second, third = add(in_flight, 2, 3, 1)
    assert traffic.num_ahead == 4
    assert finish(in_flight, first) == [False, True]
    assert traffic.num_ahead == 1
    finish(in_flight, second)
    assert traffic.num_ahead == 0
    finish(in_flight, third)
    assert traffic.num_ahead == 0
    assert not in_flight.batches
    assert not in_flight.jobs


def test_worker_that_prepares_the_next_batch_has_begun_two(in_flight, traffic):
    in_flight.depth = 2
    first, second, third = add(in_flight, 1, 1, 5)
    assert traffic.num_ahead == 5
    finish(in_flight, second)
    assert traffic.num_ahead == 0
    finish(in_flight, first)
    finish(in_flight, third)
    assert traffic.num_ahead == 0


def test_concurrent_worker_has_begun_whatever_it_holds(in_flight, traffic):
    in_flight.is_concurrent = True
    add(in_flight, 1, 1, 1)
    assert traffic.num_ahead == 0
    suspects, innocent = in_flight.drain()
    assert [company for _, company in suspects] == [3, 3, 3]
    assert innocent == []


def test_batch_that_was_cancelled_before_it_began_changes_nothing_for_the_running_one(in_flight, traffic):
    running, ahead = add(in_flight, 1, 2)
    assert finish(in_flight, ahead, now=7.0) == [False, True]
    assert traffic.num_ahead == 0
    assert running[0].started == 0.0
    assert in_flight.seconds_without_progress(9.0) == 9.0


def test_next_batch_begins_when_the_one_before_it_ends(in_flight):
    first, second = add(in_flight, 1, 1)
    finish(in_flight, first, now=5.0)
    assert (second[0].started, second[0].progress) == (5.0, 5.0)
    assert in_flight.seconds_without_progress(6.0) == 1.0


def test_dead_workers_jobs_are_suspects_if_begun_and_innocent_if_not(in_flight, traffic):
    (_, begun), (_, waiting) = add(in_flight, 2, 2)
    begun[0].cancel()
    suspects, innocent = in_flight.drain()
    assert suspects == [(begun[1], 2)]
    assert innocent == waiting
    assert traffic.num_ahead == 0
    assert in_flight.drain() == ([], [])


def test_what_is_not_begun_can_be_taken_back(in_flight):
    (_, begun), (batch, waiting) = add(in_flight, 1, 2)
    old = [job.id for job in waiting]
    waiting[0].cancel()
    assert in_flight.take_back() == {old[1]: waiting[1]}
    assert waiting[1].id != old[1]
    assert in_flight.take_back() == {}
    assert [in_flight.finish(job_id, batch, 0.0) for job_id in old] == [False, True]
    assert [job for job, _ in in_flight.drain()[0]] == begun


def test_only_those_who_are_silent_are_to_blame(in_flight):
    in_flight.is_concurrent = True
    [(_, [silent])] = add(in_flight, 1)
    [(_, [fresh])] = add(in_flight, 1, now=8.0)
    assert in_flight.seconds_without_progress(9.0) == 9.0
    in_flight.blame_silent(5.0, 9.0)
    assert (silent.crashes, fresh.crashes) == (1, 0)
    in_flight.answers_all = True
    in_flight.last_message_at = 8.5
    assert in_flight.seconds_without_progress(9.0) == 0.5
    in_flight.blame_silent(5.0, 9.0)
    assert silent.crashes == 1


# ---- clients that do not read ----


def test_a_worker_that_waits_for_a_client_is_not_silent(in_flight):
    [(_, [job])] = add(in_flight, 1)
    assert in_flight.pause(job.id, until=15.0)
    assert not in_flight.pause(job.id, until=20.0)
    assert in_flight.seconds_silent(100.0) == 0.0
    assert in_flight.seconds_without_progress(100.0) == 100.0  # jobs behind it move to another worker
    assert in_flight.resume(job.id, 100.0)
    assert not in_flight.resume(job.id, 100.0)
    assert in_flight.seconds_silent(101.0) == 1.0


def test_a_paused_job_does_not_hide_that_a_concurrent_worker_is_silent(in_flight):
    in_flight.is_concurrent = True
    (_, [paused]), (_, [other]) = add(in_flight, 1, 1)
    in_flight.pause(paused.id, until=15.0)
    assert in_flight.seconds_silent(10.0) == 10.0
    in_flight.blame_silent(5.0, 10.0)
    assert (paused.crashes, other.crashes) == (0, 1)


def test_paused_jobs_are_overdue_after_their_time_and_forgotten_when_finished(in_flight):
    [(batch, [job])] = add(in_flight, 1)
    in_flight.pause(job.id, until=15.0)
    assert in_flight.overdue(14.0) == []
    assert in_flight.overdue(16.0) == [job]
    in_flight.finish(job.id, batch, 16.0)
    assert in_flight.overdue(16.0) == []
    assert not in_flight.pause(job.id, until=20.0)
