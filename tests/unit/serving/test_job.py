"""One request in flight."""

from __future__ import annotations

import asyncio

import pytest

from flambeau.errors import BadRequest
from flambeau.serving.job import ReplyCollector, RequestBody
from flambeau.wire.messages import Part
from support.jobs import BrokenListener, new_job


def test_job_ends_exactly_once():
    job = new_job()
    job.deliver([Part(job.id, b"a", last=False), Part(job.id, b"b", last=False)])
    job.deliver([Part(job.id, b"c")])
    job.deliver([Part(job.id, b"d")])
    job.fail(BadRequest("late"))
    job.cancel()
    assert [part.body for part in job.receiver.parts] == [b"a", b"b", b"c"]
    assert job.receiver.errors == []


def test_cancelled_job_gets_nothing_and_its_holder_drops_it():
    job, dropped = new_job(), []
    job.on_cancel = dropped.append
    job.cancel()
    job.cancel()
    job.deliver([Part(job.id, b"x")])
    assert dropped == [job]
    assert job.receiver.parts == job.receiver.errors == []


def test_expired_job_is_cancelled_and_gets_an_error():
    job, dropped = new_job(), []
    job.on_cancel = dropped.append
    error = BadRequest("late")
    job.expire(error)
    job.expire(error)
    assert dropped == [job]
    assert job.receiver.errors == [error]


async def test_end_of_a_job_cancels_its_deadline():
    job = new_job()
    job.expiry = asyncio.get_running_loop().call_later(60, job.cancel)
    job.deliver([Part(job.id, b"x")])
    assert job.expiry.cancelled()


def test_shared_body_is_returned_after_its_last_reader():
    returned = []
    segment = object()
    body = RequestBody.shared(segment, 10, returned.append)
    job = new_job(body=body)
    body.hold()  # a worker reads it
    job.cancel()
    assert returned == []
    body.release()
    assert returned == [segment]


def test_receiver_that_raises_affects_nothing_else(caplog):
    failed, expired = (new_job(BrokenListener(even_errors=True)) for _ in range(2))
    failed.fail(BadRequest("no"))
    expired.expire(BadRequest("late"))
    assert failed.is_over
    assert expired.is_over
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_other_kinds_than_predictions_run_alone():
    assert [new_job(kind=kind).is_alone for kind in ("predict", "explain", "describe")] == [False, True, True]


def test_reply_can_be_resumed_until_a_part_without_state_was_sent():
    job = new_job()
    assert job.can_resume
    parts = [Part(job.id, b"x", last=False, state=b"1")]
    job.keep_state(parts)
    job.deliver(parts)
    assert job.can_resume
    assert job.to_request(share=False).state == [b"1"]
    job.keep_state([Part(job.id, b"y", last=False)])
    assert not job.can_resume
    job.keep_state(parts)
    assert not job.can_resume  # a gap stays a gap


def test_new_id_is_unlike_the_old_one():
    job = new_job()
    old = job.id
    job.renew_id()
    assert job.id != old


async def test_collector_joins_the_parts_of_a_reply():
    collector = ReplyCollector()
    job = new_job(collector)
    job.deliver([Part(job.id, b"a", last=False)])
    job.deliver([Part(job.id, b"b")])
    assert await collector.done == b"ab"


async def test_collector_raises_the_error_of_a_job():
    collector = ReplyCollector()
    new_job(collector).fail(BadRequest("no"))
    with pytest.raises(BadRequest, match="no"):
        await collector.done
