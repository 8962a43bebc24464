"""What the server hears of a worker of several processes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.workers.rank_group import Lockstep, RankGroup
from flambeau.serving.workers.worker_process import WorkerProcess, WorkerSpec
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Request, Run, Samples, Stop, cancelled

LOAD = Load("m", "1.0", "/", "h.py", 1, None, True, True, 1)


def new_group(told, *, keeps_step):
    other = WorkerSpec(id=2, load=LOAD, environment={}, max_frame_bytes=1)
    spec = WorkerSpec(id=1, load=LOAD, environment={}, max_frame_bytes=1, others=(other,), keeps_step=keeps_step)
    output = SimpleNamespace(of_rank=lambda rank: None)
    return RankGroup(
        spec, told.extend, lambda fault: None, output, partial(WorkerProcess, events=ServerEvents(), launcher=None)
    )


@pytest.mark.parametrize(
    ("keeps_step", "heard"),
    [
        (False, Ready(True, True, 2, True)),  # rank 0 leads the others itself, so it is as rank 0 says
        (True, Ready(can_share_memory=False)),
    ],
)
def test_group_is_ready_when_its_last_rank_is(keeps_step, heard):
    told = []
    group = new_group(told, keeps_step=keeps_step)
    group._receive(0, [Ready(True, True, 2, True)])
    assert told == []
    group._receive(1, [Ready()])
    assert told == [heard]


async def test_ranks_that_fail_because_others_are_killed_end_no_job():
    told, killed = [], []
    group = new_group(told, keeps_step=True)
    group.processes = [SimpleNamespace(kill=killed.append, note_ready=lambda: None) for _ in range(2)]
    for rank in (0, 1):
        group._new_channel(rank)
        group._receive(rank, [Ready()])
    told.clear()
    group.send(batch(1))
    group._receive(0, [Failed([1], 503, "no")])  # rank 1 waits for it
    cause = WorkerExit(reason="out of step")
    group.kill(cause)
    group._receive(1, [Failed([1], 503, "connection closed by peer")])
    assert told == []  # the jobs of a worker that is killed end with its exit
    assert killed == [cause, cause]
    group._cancel_timer()


def batch(*job_ids):
    return Run([Request(job_id, "", [], b"") for job_id in job_ids])


def test_batches_are_given_one_at_a_time():
    step = Lockstep(2)
    assert step.to_ranks(batch(1)) == [batch(1)]
    assert step.to_ranks(batch(2)) == []
    assert step.from_rank(0, [Part(1, b"answer")]) == ([], [])
    assert step.from_rank(1, [Part(1, b"")]) == ([Part(1, b"answer")], [batch(2)])


def test_rank_that_is_done_first_changes_nothing():
    step = Lockstep(2)
    step.to_ranks(batch(1))
    assert step.from_rank(1, [Part(1, b"")]) == ([], [])
    assert step.stragglers == []  # rank 0 may take its time
    assert step.from_rank(0, [Part(1, b"answer")]) == ([Part(1, b"answer")], [])
    assert step.to_ranks(batch(2)) == [batch(2)]  # nothing runs


def test_chunks_and_measurements_of_rank_0_pass_at_once():
    step = Lockstep(2)
    step.to_ranks(batch(1))
    chunk, samples = Part(1, b"a", last=False), Samples([])
    assert step.from_rank(0, [chunk, samples]) == ([chunk, samples], [])
    assert step.from_rank(1, [chunk, samples]) == ([], [])


def test_what_rank_0_says_of_a_failure_counts():
    step = Lockstep(2)
    step.to_ranks(batch(1, 2))
    assert step.from_rank(1, [Failed([1, 2], 503, "theirs")]) == ([], [])
    told, _ = step.from_rank(0, [Failed([1, 2], 503, "ours", "trace")])
    assert told == [Failed([1], 503, "ours", "trace"), Failed([2], 503, "ours", "trace")]


def test_ranks_that_are_not_done_though_rank_0_is_are_known():
    step = Lockstep(3)
    step.to_ranks(batch(1))
    step.from_rank(1, [Part(1, b"")])
    step.from_rank(0, [Failed([1], 503, "no")])
    assert step.stragglers == [2]


def test_cancellation_reaches_no_job_that_has_begun():
    step = Lockstep(2)
    step.to_ranks(batch(1))
    step.to_ranks(batch(2, 3))
    assert step.cancel(Cancel([1])) == []
    assert step.cancel(Cancel([2])) == [cancelled(2)]
    step.from_rank(0, [Part(1, b"")])
    assert step.from_rank(1, [Part(1, b"")])[1] == [batch(3)]


def test_batch_that_was_cancelled_whole_is_left_out():
    step = Lockstep(1)
    step.to_ranks(batch(1))
    step.to_ranks(batch(2))
    step.to_ranks(Stop())
    step.cancel(Cancel([2]))
    assert step.from_rank(0, [Part(1, b"")])[1] == [Stop()]


def test_stop_waits_for_what_was_sent_before_it():
    step = Lockstep(2)
    step.to_ranks(batch(1))
    assert step.to_ranks(Stop()) == []
    step.from_rank(0, [Part(1, b"")])
    assert step.from_rank(1, [Part(1, b"")])[1] == [Stop()]
    assert Lockstep(2).to_ranks(Stop()) == [Stop()]


def test_word_on_a_job_that_is_over_is_ignored():
    assert Lockstep(2).from_rank(0, [Part(7, b""), Failed([8], 503, "late")]) == ([], [])
