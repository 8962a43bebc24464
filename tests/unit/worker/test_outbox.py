"""The outbox: open jobs, cancellations, and what is sent of them."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from flambeau.wire.messages import Cancel, Failed, Flow, Part, Ready, Request, Run, Samples
from flambeau.worker.context import Context
from flambeau.worker.outbox import FollowerChannel, Outbox
from flambeau.worker.results import BadResult
from support.channels import FakeChannel


@pytest.fixture
def channel():
    return FakeChannel()


@pytest.fixture
def outbox(channel):
    return Outbox(channel, 10)


def request(job_id):
    return Request(job_id, f"r{job_id}", [], b"")


@pytest.fixture
def context(outbox):
    """A batch of the open jobs 1 and 2."""
    return opened(outbox, 1, 2)


def opened(outbox, *job_ids):
    context = Context("m", ".", None, 4, None, "1")
    requests = [request(job_id) for job_id in job_ids]
    context.begin(requests, [None] * len(requests))
    outbox.open(requests)
    return context


# ---- replies ----


def test_last_parts_end_their_jobs_and_the_first_one_has_the_times(channel, outbox, context):
    called = time.monotonic() - 0.5
    outbox.finish(context, ["a", "b"], (called - 0.25, called, None))
    [[first, second]] = channel.frames
    assert (first.job_id, first.body, second) == (1, b"a", Part(2, b"b"))
    assert first.work.read_s == pytest.approx(0.25)
    assert 0.5 <= first.work.handler_s <= first.work.ended - called
    assert first.work.stages is None
    outbox.fail(context.requests, ValueError())
    assert len(channel.frames) == 1


def test_samples_are_sent_before_the_replies_they_belong_to(channel, outbox, context):
    context.metrics.add_counter("seen", 1)
    outbox.finish(context, ["a", "b"])
    assert [type(message) for message in channel.frames[0]] == [Samples, Part, Part]
    outbox.send_samples(context)  # they were taken
    assert len(channel.frames) == 1


def test_chunks_keep_their_jobs_open(channel, outbox, context):
    outbox.send_values(context, ["a", "b"])
    outbox.send_values(context, ["c"], [1])
    outbox.send(context, 0, "d", last=False)
    assert channel.frames == [
        [Part(1, b"a", False), Part(2, b"b", False)],
        [Part(2, b"c", False)],
        [Part(1, b"d", False)],
    ]
    outbox.fail(context.requests, ValueError())
    assert channel.failures == [([1, 2], 503)]


def test_step_ends_only_the_jobs_whose_part_is_the_last(channel, outbox, context):
    outbox.send_step(context, ["a", "b"], [True, False])
    outbox.fail(context.requests, ValueError())
    assert channel.failures == [([2], 503)]


def test_failure_is_sent_once_and_only_for_open_jobs(channel, outbox, context):
    outbox.fail([context.requests[0], request(3)], ValueError())
    outbox.fail([context.requests[0]], ValueError())
    assert channel.failures == [([1], 503)]


def test_reply_that_is_too_large_is_a_bad_result(channel, outbox, context):
    with pytest.raises(BadResult, match="max_response_size is 10"):
        outbox.finish(context, ["x" * 11, "b"])
    with pytest.raises(BadResult, match="max_response_size is 10"):
        outbox.send(context, 0, "x" * 11, last=True)
    assert channel.frames == []


def test_results_of_a_step_are_sent_in_frames_of_the_allowed_size(channel, outbox, context):
    outbox.send_messages(context, [Part(1, b"x" * 6, False), Part(2, b"y" * 6, False)])
    assert [len(frame) for frame in channel.frames] == [1, 1]
    outbox.send_messages(context, [Part(1, b"x"), Part(2, b"y" * 11)])
    assert [type(message) for message in channel.frames[2]] == [Part, Failed]
    outbox.fail(context.requests, ValueError())  # both jobs are over
    assert len(channel.frames) == 3


def test_heartbeat_is_a_message_without_samples(channel, outbox):
    outbox.send_heartbeat()
    assert channel.frames == [[Samples([])]]


# ---- batches that may be split ----


def test_failed_batch_is_split_while_all_its_jobs_are_untouched(outbox, context):
    assert outbox.can_split(context)
    outbox.send_values(context, ["a", "b"])
    assert not outbox.can_split(context)


def test_batch_of_one_or_with_an_answered_job_is_not_split(outbox, context):
    outbox.abandon(1)
    assert not outbox.can_split(context)
    assert not outbox.can_split(opened(outbox, 3))


def test_batch_is_not_split_where_the_handler_keeps_state(channel):
    outbox = Outbox(channel, 10, may_split=False)
    assert not outbox.can_split(opened(outbox, 1, 2))


# ---- cancellation ----


def test_only_open_jobs_are_marked_as_cancelled(outbox, context):
    outbox.cancel([1, 9])
    assert outbox.is_cancelled(1)
    assert not outbox.is_cancelled(9)
    assert not outbox.all_cancelled(context)
    outbox.cancel([2])
    assert outbox.all_cancelled(context)


def test_cancelled_job_is_answered_once(channel, outbox, context):
    outbox.cancel([1])
    assert outbox.reject_cancelled(context.requests[0])
    assert not outbox.reject_cancelled(context.requests[0])
    assert not outbox.abandon(1)
    assert outbox.abandon(2)
    assert channel.failures == [([1], 499), ([2], 499)]


def test_waiting_cancellations_are_marked_and_stay_in_the_channel(channel, outbox, context):
    channel.waiting.extend([Run([request(3)]), Cancel([1, 3])])
    outbox.poll_cancellations()
    assert outbox.reject_cancelled(request(3))  # it has not begun
    assert outbox.is_cancelled(1)
    assert len(channel.waiting) == 2
    outbox.forget_cancelled([1, 3])
    assert not outbox.reject_cancelled(context.requests[0])


def test_other_threads_do_not_poll_the_channel(channel, outbox, context):
    channel.waiting.append(Cancel([1]))
    thread = threading.Thread(target=outbox.poll_cancellations)
    thread.start()
    thread.join()
    assert not outbox.reject_cancelled(context.requests[0])


def test_messages_found_while_polling_are_announced_where_batches_overlap(channel, outbox, context):
    calls = []
    outbox.on_arrived = lambda: calls.append(1)
    outbox.poll_cancellations()
    assert calls == []
    channel.waiting.append(Cancel([1, 9]))
    outbox.poll_cancellations()
    assert calls == [1]
    assert not outbox.reject_cancelled(request(9))  # not open: it is over


# ---- follower ranks ----


def test_follower_channel_sends_only_that_a_rank_is_ready_failed_or_done(channel):
    follower = FollowerChannel(channel)
    failed = Failed([3], 503, "no")
    follower.send([Samples([]), Part(1, b"x", False)])
    follower.send([Ready(), Part(1, b"x", status=201), failed])
    assert channel.frames == [[Ready(), Part(1, b""), failed]]
    channel.waiting.append(Cancel([1]))
    assert follower.poll() is channel.waiting
    assert follower.receive() == Cancel([1])


# ---- clients that do not read ----


class SlowClients(FakeChannel):
    """A channel with messages that arrive while the worker waits, one round at each look."""

    def __init__(self, *rounds):
        super().__init__()
        self.rounds = [*rounds]
        self.socket, self.other = socket.socketpair()

    def poll(self):
        if self.rounds:
            self.waiting.extend(self.rounds.pop(0))
        return super().poll()

    def close(self):
        self.socket.close()
        self.other.close()


@pytest.fixture
def slow():
    """Makes an outbox whose channel has these rounds."""
    channels = []

    def make(*rounds):
        channels.append(SlowClients(*rounds))
        return channels[-1], Outbox(channels[-1], 100)

    yield make
    for channel in channels:
        channel.close()


def test_a_handler_waits_while_its_client_does_not_read(slow):
    channel, outbox = slow([Flow(1, True)], [], [Flow(1, False)])
    outbox.send_values(opened(outbox, 1), ["a"])
    assert channel.rounds == []
    assert not outbox.has_paused


def test_a_cancelled_job_is_not_waited_for(slow):
    _, outbox = slow([Flow(1, True)], [Cancel([1])])
    outbox.send_values(opened(outbox, 1), ["a"])
    assert outbox.is_cancelled(1)


def test_a_client_that_reads_is_not_held_up_by_one_that_does_not(slow):
    _, outbox = slow([Flow(1, True)])
    context = opened(outbox, 1, 2)
    outbox.send_values(context, ["a", "b"])
    assert outbox.is_paused(1)
    assert not outbox.all_paused(context.requests)


def test_a_worker_does_not_wait_for_clients_of_a_server_that_is_gone(slow):
    channel, outbox = slow([Flow(1, True)])
    channel.other.close()
    outbox.send_values(opened(outbox, 1), ["a"])
    assert outbox.is_paused(1)


def test_a_pause_for_a_job_that_is_over_has_no_effect(channel, outbox):
    context = opened(outbox, 1)
    outbox.finish(context, ["a"])
    outbox.set_flow(Flow(1, True))
    assert not outbox.has_paused


def test_an_event_loop_is_not_blocked_by_a_client_that_does_not_read(slow):
    _, outbox = slow([Flow(1, True)])
    outbox.on_arrived = lambda: None
    context = opened(outbox, 1)
    outbox.send_values(context, ["a"])
    assert outbox.all_paused(context.requests)  # the task waits, and others run
