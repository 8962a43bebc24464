"""Replies of gRPC calls: parts of clients that read, and of those that do not."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flambeau.errors import ReplyNotRead
from flambeau.frontend.grpc.predictions import MAX_UNREAD_BYTES, StreamReply
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.reply_budget import MAX_HELD_BYTES, ReplyBudget
from flambeau.wire.messages import Part

MB = 1 << 20


class Worker:
    """Notes what happens to the flow of a job."""

    def __init__(self):
        self.calls = []

    def pause(self, job, excess_bytes):
        self.calls.append("pause")

    def resume(self, job):
        self.calls.append("resume")


@pytest.fixture
def budget():
    return ReplyBudget()


def new_reply(budget):
    reply = StreamReply(SimpleNamespace(answers=Counter(), count_broken=Mock()), budget)
    reply.job = job = Job(reply, request_id="r", headers=[], body=RequestBody(b""), arrived=0.0)
    job.flow = Worker()
    return reply, job


def deliver(job, *sizes, last=False):
    parts = [Part(job.id, b"x" * size, False) for size in sizes]
    job.deliver([*parts, Part(job.id, b"", True)] if last else parts)


async def test_a_reader_that_keeps_up_is_not_counted(budget):
    reply, job = new_reply(budget)
    deliver(job, 10, 20, last=True)
    assert [len(body) async for body in reply.bodies()] == [10, 20]
    assert budget.held_bytes == 0
    assert job.flow.calls == []


async def test_a_job_is_paused_until_its_client_has_read_a_part(budget):
    reply, job = new_reply(budget)
    deliver(job, *[MB] * 5)
    assert job.flow.calls == ["pause"]
    assert budget.held_bytes > MAX_HELD_BYTES
    bodies = reply.bodies()
    for _ in range(4):
        await anext(bodies)
    assert job.flow.calls == ["pause", "resume"]
    deliver(job, 7, last=True)
    assert [len(body) async for body in bodies] == [MB, 7]
    assert budget.held_bytes == 0


async def test_a_reply_that_cannot_be_paused_is_cut_and_holds_nothing(budget):
    reply, job = new_reply(budget)
    deliver(job, *[MB] * (1 + (MAX_UNREAD_BYTES >> 20)))
    assert job.is_over
    assert budget.held_bytes == 0
    with pytest.raises(ReplyNotRead, match="The client stopped reading"):
        [body async for body in reply.bodies()]


async def test_the_greedy_are_cut_and_not_the_small():
    budget = ReplyBudget(total_bytes=8 * MB)
    small, small_job = new_reply(budget)
    deliver(small_job, 100_000)
    _, first = new_reply(budget)
    deliver(first, 5 * MB)
    _, second = new_reply(budget)
    deliver(second, 4 * MB)
    assert (small_job.is_over, first.is_over, second.is_over) == (False, True, False)
    assert small._unread


async def test_a_cancelled_reply_is_free_without_the_garbage_collector(budget):
    reply, job = new_reply(budget)
    deliver(job, *[MB] * 5)
    gone = weakref.ref(reply)
    gc.disable()
    try:
        reply.cancel()
        assert job.is_over
        assert budget.held_bytes == 0
        del reply, job
        assert gone() is None
    finally:
        gc.enable()
