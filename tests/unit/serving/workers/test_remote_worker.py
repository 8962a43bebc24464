"""What the server's end of a worker does with messages."""

from __future__ import annotations

import time

import pytest

from flambeau.errors import JobFailed, ReplyNotRead
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.job import MAX_STATE_BYTES
from flambeau.serving.reply_budget import HELD_UP_S
from flambeau.wire.messages import Cancel, EngineReport, Failed, Flow, Part, Work
from support.jobs import BrokenListener, new_job, new_worker


async def test_client_gets_an_error_if_its_reply_cannot_be_delivered():
    worker, job = new_worker(), new_job(BrokenListener())
    worker.send([job])
    worker._receive([Part(job.id, b"x")])
    assert [(str(error), error.status) for error in job.receiver.errors] == [
        ("The answer could not be delivered.", 500)
    ]
    assert not worker.batches


async def test_rest_of_a_reply_that_cannot_be_delivered_is_cancelled():
    worker, job = new_worker(), new_job(BrokenListener())
    worker.send([job])
    worker._receive([Part(job.id, b"x", last=False)])
    assert [type(error) for error in job.receiver.errors] == [JobFailed]
    assert worker._channel.sent[-1] == Cancel([job.id])


async def test_worker_is_idle_again_though_a_receiver_takes_nothing(caplog):
    worker, job = new_worker(), new_job(BrokenListener(even_errors=True))
    worker.send([job])
    worker._receive([Part(job.id, b"x")])
    assert worker.is_idle
    assert {record.levelname for record in caplog.records} == {"ERROR"}


@pytest.mark.parametrize(
    ("states", "can_resume"),
    [
        ([b"1", b"2"], True),
        ([b"1", b""], False),
        ([b"", b"2"], False),
        ([bytes(MAX_STATE_BYTES), b"2"], False),
        ([], True),
    ],
)
async def test_reply_can_be_resumed_as_long_as_every_part_brings_its_state(states, can_resume):
    worker, job = new_worker(is_concurrent=True, places=4), new_job()
    worker.send([job])
    for state in states:
        worker._receive([Part(job.id, b"x", last=False, state=state)])
    assert job.can_resume is can_resume
    assert job.to_request(share=False).state == (states if can_resume else [])


@pytest.mark.parametrize(("kind", "prediction_ms"), [("describe", None), ("predict", 500)])
async def test_description_is_not_measured_as_a_prediction(kind, prediction_ms):
    worker, job = new_worker(), new_job(kind=kind)
    worker.send([job])
    worker._receive([Part(job.id, b"x", work=Work(1.0, 2.0, 0.0, 0.5))])
    assert worker._traffic.prediction_ms == prediction_ms


async def test_jobs_of_a_batch_know_where_their_time_went_when_they_are_answered():
    worker, first, second = new_worker(), new_job(), new_job()
    worker.send([first, second])
    known = []
    first.receiver.on_parts = lambda parts: known.append(first.times)
    second.receiver.on_parts = lambda parts: known.append(second.times)
    now = time.monotonic()
    work = Work(now, now, 0.0, 0.25, (0.05, 0.15, 0.05))
    worker._receive([Part(first.id, b"a", work=work), Part(second.id, b"b")])
    assert [(times.work, times.batch_size, times.worker) for times in known] == [(work, 2, worker.spec.name)] * 2
    assert worker._traffic.stages.inference.total == 0.15
    assert worker._traffic.stages.inference.number == 1


async def test_times_of_a_stream_are_known_at_its_head_and_complete_at_its_end():
    worker, job = new_worker(), new_job()
    worker.send([job])
    worker._receive([Part(job.id, b"a", last=False)])
    head = job.times
    assert (head.work, head.first_part, head.received >= head.sent) == (None, 0.0, True)
    worker._receive([Part(job.id, b"b", last=False)])
    assert job.times is head
    work = Work(head.sent, head.received, 0.0, 0.1)
    worker._receive([Part(job.id, b"", work=work)])
    assert (job.times.work, job.times.first_part) == (work, head.received)


async def test_failed_job_has_its_times_too():
    worker, job = new_worker(), new_job()
    worker.send([job])
    worker._receive([Failed([job.id], 500, "no")])
    assert job.times.sent >= job.arrived


async def test_load_of_an_engine_is_gone_with_its_worker_and_its_counts_stay():
    worker = new_worker(is_concurrent=True, places=4)
    gaps = [0] * 17
    gaps[2] = 3
    worker._receive([EngineReport(2, 1, 10, 5, 1, 4, gaps, 0.012, 7, 3)])
    engine = worker._traffic.engine
    assert (engine.num_running, engine.num_waiting, engine.kv_usage, engine.token_gaps.number) == (2, 1, 0.5, 3)
    worker._end(WorkerExit(reason="x"))
    assert (engine.num_running, engine.kv_usage, engine.num_preempted, engine.token_gaps.number) == (0, 0.0, 1, 3)
    assert (engine.num_blocks_saved, engine.num_blocks_restored) == (7, 3)


async def test_parts_of_one_reply_that_arrive_together_are_delivered_together():
    worker, first, second = new_worker(), new_job(), new_job()
    worker.send([first, second])
    calls = []
    first.receiver.on_parts = lambda parts: calls.append(len(parts))
    second.receiver.on_parts = lambda parts: calls.append(len(parts))
    worker._receive([Part(first.id, b"a", last=False), Part(first.id, b"b"), Part(second.id, b"c")])
    assert calls == [2, 1]
    assert worker.is_idle


async def test_failed_jobs_get_their_status_and_the_worker_is_idle_again():
    worker, job = new_worker(), new_job()
    worker.send([job])
    worker._receive([Failed([job.id], 507, "out of memory", "trace")])
    [error] = job.receiver.errors
    assert (error.status, error.cause) == (507, "trace")
    assert worker.is_idle


async def test_jobs_of_a_worker_that_exits_are_returned():
    lost = []
    worker = new_worker(on_lost=lambda *arguments: lost.append(arguments))
    jobs = [new_job(), new_job()]
    worker.send(jobs[:1])
    worker.send(jobs[1:])
    crash = WorkerExit(reason="gone")
    worker._end(crash)
    assert lost == [(crash, [(jobs[0], 1)], [jobs[1]])]
    assert not worker.is_ready


class BatchEvents(ServerEvents):
    reports_batches = True

    def __init__(self):
        self.batches = []

    def batch_sent(self, worker):
        self.batches.append(worker)


async def test_batches_are_reported_only_where_they_are_asked_for():
    events = BatchEvents()
    worker = new_worker(events=events)
    worker.send([new_job(), new_job()])
    assert events.batches == ["W-1-m_1.0"]
    new_worker().send([new_job()])
    assert events.batches == ["W-1-m_1.0"]


# ---- clients that do not read ----


async def test_a_job_is_paused_once_and_goes_on_once():
    worker, job = new_worker(), new_job()
    job.pause(10)  # nobody works on it yet
    worker.send([job])
    for _ in range(2):
        job.pause(10)
    for _ in range(2):
        job.resume()
    assert worker._channel.sent[1:] == [Flow(job.id, True), Flow(job.id, False)]


async def test_a_paused_job_goes_on_when_it_is_cancelled():
    worker, job = new_worker(), new_job()
    worker.send([job])
    job.pause(10)
    job.cancel()
    assert worker._channel.sent[1:] == [Flow(job.id, True), Flow(job.id, False), Cancel([job.id])]


async def test_a_job_that_holds_up_others_for_too_long_is_cut(caplog):
    worker, job = new_worker(), new_job()
    worker.send([job])
    job.pause(10)
    began = worker._now()
    worker.cut_overdue()
    assert not job.is_over
    worker._now = lambda: began + HELD_UP_S + 1
    worker.cut_overdue()
    assert [type(error) for error in job.receiver.errors] == [ReplyNotRead]
    assert worker._channel.sent[-1] == Cancel([job.id])
    assert job.request_id in caplog.text
