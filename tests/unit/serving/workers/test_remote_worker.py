"""What a worker's end on the server does with what it hears."""

from __future__ import annotations

import asyncio

from flambeau.errors import JobFailed
from flambeau.serving.job import MAX_STATE_BYTES
from flambeau.wire.messages import Cancel, Part
from support.jobs import Clumsy, new_job, new_worker


def test_client_whose_answer_cannot_be_delivered_is_told_so():
    async def answer(last):
        worker, job = new_worker(), new_job(Clumsy())
        worker.send([job])
        worker._receive([Part(job.id, b"x", last)])
        return job, worker

    job, worker = asyncio.run(answer(last=True))
    assert [(str(error), error.status) for error in job.receiver.errors] == [
        ("The answer could not be delivered.", 500)
    ]
    assert not worker.batches
    job, worker = asyncio.run(answer(last=False))
    assert [type(error) for error in job.receiver.errors] == [JobFailed]
    assert worker._channel.sent[-1] == Cancel([job.id])  # nobody waits for the rest


def test_worker_is_free_again_though_a_client_can_be_told_nothing(caplog):
    async def answer():
        worker, job = new_worker(), new_job(Clumsy(even_errors=True))
        worker.send([job])
        worker._receive([Part(job.id, b"x")])
        return worker.is_idle

    assert asyncio.run(answer())
    assert "could not be delivered" in caplog.text


def test_state_of_a_reply_is_kept_for_another_worker_as_long_as_every_part_brings_it():
    async def deliver(*states):
        worker, job = new_worker(is_concurrent=True, places=4), new_job()
        worker.send([job])
        for state in states:
            worker._receive([Part(job.id, b"x", last=False, state=state)])
        return job

    job = asyncio.run(deliver(b"1", b"2"))
    assert (job.can_go_on, job.to_request(share=False).state) == (True, [b"1", b"2"])
    assert not asyncio.run(deliver(b"1", b"")).can_go_on
    assert not asyncio.run(deliver(b"", b"2")).can_go_on
    assert not asyncio.run(deliver(bytes(MAX_STATE_BYTES), b"2")).can_go_on
    assert asyncio.run(deliver()).can_go_on


def test_description_is_not_measured_as_a_prediction():
    async def answer(kind):
        worker, job = new_worker(), new_job(kind=kind)
        worker.send([job])
        worker._receive([Part(job.id, b"x", handler_s=0.5)])
        return worker._traffic.prediction_ms

    assert asyncio.run(answer("describe")) is None
    assert asyncio.run(answer("predict")) == 500
