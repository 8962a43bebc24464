"""The worker's loop: every mode gets Run, Cancel and Stop through a fake channel."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from flambeau.wire.messages import Cancel, Flow, Load, Part, Ready, Request, Run, Stop
from flambeau.worker.context import Context
from flambeau.worker.execution_modes import MODES
from flambeau.worker.generation import complete
from flambeau.worker.inputs import InputReader
from flambeau.worker.loader import LoadedHandler
from flambeau.worker.loop import BatchRunner, WorkerLoop
from flambeau.worker.model import LoadedModel
from flambeau.worker.outbox import Outbox
from flambeau.worker.worker import serve
from support.channels import FakeChannel

JOB_MODES = [name for name in MODES if name != "follower"]
STEP_MODES = ["continuous", "generation"]
GENERATING = Ready(is_concurrent=True, can_share_memory=True, places=2, abilities=["generate"], max_length=77)


class CountingGeneration:
    """One number a step for each job, up to the number in its body."""

    places = 2
    abilities = ("generate",)
    max_length = 77

    def __init__(self):
        self.jobs: dict[int, list[int]] = {}  # job id → [made, wanted]
        self.is_closed = False
        self.has_followed = False

    @property
    def has_work(self):
        return bool(self.jobs)

    def join(self, request, row):
        self.jobs[request.job_id] = [0, row["body"]]

    def step(self):
        parts = []
        for job_id, job in [*self.jobs.items()]:
            job[0] += 1
            parts.append(Part(job_id, b"%d" % job[0], job[0] == job[1]))
            if job[0] == job[1]:
                del self.jobs[job_id]
        return parts

    def cancel(self, job_id):
        del self.jobs[job_id]

    def follow(self):
        self.has_followed = True

    def close(self):
        self.is_closed = True


def echo(rows, context):
    return [b"%d" % row["body"] for row in rows]


async def echo_async(rows, context):
    await asyncio.sleep(0)
    return echo(rows, context)


def complete_batch(inputs, context):
    return inputs


class Setup:
    """A mode with its channel; `handle` replaces what the handler does."""

    def __init__(self, mode, *messages, handle=None):
        self.channel = FakeChannel(*messages)
        self.generation = CountingGeneration()
        is_async = mode == "async"
        self.event_loop = asyncio.new_event_loop() if is_async else None
        handle = handle or (echo_async if is_async else echo)
        outbox = Outbox(self.channel, 1000)
        reader = InputReader(decode=True)
        model = LoadedModel(
            mode=mode,
            handler=LoadedHandler(handle, is_async, abilities=("embed",)),
            context=Context("m", ".", None, 4, None, "1"),
            reader=reader,
            event_loop=self.event_loop,
            pipeline=(lambda rows: handle(rows, None), complete_batch),
            generation=complete(self.generation),
            can_share_memory=True,
        )
        self.mode = MODES[mode](model, BatchRunner(handle, reader, model.context, outbox), outbox)
        self.loop = WorkerLoop(self.channel, self.mode)

    def serve(self):
        ours, theirs = socket.socketpair()  # an event loop waits for it; nothing ever arrives
        self.channel.socket = theirs
        try:
            self.mode.serve(self.loop)
        finally:
            self.close()
            ours.close()
            theirs.close()
        return self.channel

    def close(self):
        if self.event_loop is not None:
            self.event_loop.close()


def request(job_id, count=1, kind="predict"):
    return Request(job_id, f"r{job_id}", [("Content-Type", "application/json")], b"%d" % count, kind)


@pytest.mark.parametrize("mode", JOB_MODES)
def test_jobs_are_answered_and_stop_ends_the_loop(mode):
    setup = Setup(mode, Run([request(1)]), Run([request(2)]), Stop(), Run([request(3)]))
    channel = setup.serve()
    assert channel.parts(1) == channel.parts(2) == [(b"1", True)]
    assert setup.loop.is_stopping
    assert channel.failures == []


@pytest.mark.parametrize("mode", ["batches", "pipeline", "continuous"])
def test_nothing_is_run_after_stop(mode):
    channel = Setup(mode, Stop(), Run([request(1)])).serve()
    assert channel.sent == []


@pytest.mark.parametrize("mode", JOB_MODES)
def test_job_cancelled_before_it_begins_is_answered_without_the_handler(mode):
    channel = Setup(mode, Run([request(1)]), Run([request(2)]), Cancel([2]), Stop()).serve()
    assert channel.failures == [([2], 499)]
    assert channel.parts(2) == []
    assert channel.parts(1) == [(b"1", True)]


@pytest.mark.parametrize("mode", JOB_MODES)
def test_cancel_of_a_job_that_is_over_changes_nothing(mode):
    channel = Setup(mode, Cancel([7]), Run([request(1)]), Cancel([8]), Stop()).serve()
    assert channel.parts(1) == [(b"1", True)]
    assert channel.failures == []


@pytest.mark.parametrize("mode", [mode for mode in JOB_MODES if mode != "async"])
def test_loop_ends_when_the_server_is_gone(mode):
    setup = Setup(mode, Run([request(1)]))
    assert setup.serve().parts(1) == [(b"1", True)]
    assert not setup.loop.is_stopping


@pytest.mark.parametrize("mode", JOB_MODES)
def test_error_of_the_handler_fails_its_job(mode):
    def handle(rows, context):
        return [b"%d" % (1 // row["body"]) for row in rows]

    async def handle_async(rows, context):
        return handle(rows, context)

    setup = Setup(mode, Run([request(1, 0)]), handle=handle_async if mode == "async" else handle)
    if mode == "generation":
        setup.generation.join = lambda request, row: 1 // 0
    setup.channel.waiting.append(Stop())
    assert setup.serve().failures == [([1], 503)]


@pytest.mark.parametrize("mode", JOB_MODES)
def test_describe_is_run_by_the_handler_in_every_mode(mode):
    def handle(rows, context):
        return [context.get_request_header(0, "describe")]

    async def handle_async(rows, context):
        return handle(rows, context)

    described = request(1, kind="describe")
    setup = Setup(mode, Run([described]), Stop(), handle=handle_async if mode == "async" else handle)
    assert setup.serve().parts(1) == [(b"True", True)]


# ---- streams ----


def test_cancel_during_a_stream_closes_the_generator():
    def handle(rows, context):
        setup.channel.waiting.append(Cancel([1]))
        yield [b"first"]
        yield [b"second"]

    setup = Setup("batches", Run([request(1)]), handle=handle)
    assert setup.serve().parts(1) == [(b"first", False), (b"", True)]


def test_cancel_during_a_stream_closes_the_async_generator():
    async def handle(rows, context):
        setup.channel.waiting.extend([Cancel([1]), Stop()])
        yield [b"first"]
        yield [b"second"]

    setup = Setup("async", Run([request(1)]), handle=handle)
    assert setup.serve().parts(1) == [(b"first", False), (b"", True)]


def test_cancel_reaches_a_pipelined_handler_while_another_batch_is_prepared():
    prepared = threading.Event()

    def handle(rows, context):
        if rows[0]["body"] == 2:
            prepared.set()
        return rows

    def complete_cancelled(rows, context):
        prepared.wait(10)
        setup.loop.handle(Cancel([1]))
        return [b"%s" % str(context.is_cancelled(0)).encode()]

    setup = Setup("pipeline", Run([request(1)]), Run([request(2, 2)]), Stop(), handle=handle)
    setup.mode._complete = complete_cancelled
    channel = setup.serve()
    assert channel.parts(1) == [(b"True", True)]
    assert channel.parts(2) == [(b"False", True)]


# ---- steps ----


def stepping_handle():
    """A handler of continuous batching: one number a call, up to the number in the body."""
    left = {}

    def handle(rows, context):
        names = [*context.request_ids.values()]
        left.update({name: [0, row["body"]] for name, row in zip(names, rows, strict=True) if row})
        for name in names:
            left[name][0] += 1
        context.stopping_criteria = [lambda value, name=name: left[name][0] == left[name][1] for name in names]
        return [b"%d" % left[name][0] for name in names]

    return handle


@pytest.mark.parametrize("mode", STEP_MODES)
def test_stop_lets_running_jobs_finish(mode):
    channel = Setup(mode, Run([request(1, 3)]), Stop(), handle=stepping_handle()).serve()
    assert channel.parts(1) == [(b"1", False), (b"2", False), (b"3", True)]


@pytest.mark.parametrize("mode", STEP_MODES)
def test_jobs_join_and_leave_between_steps(mode):
    setup = Setup(mode, Run([request(1, 100)]), handle=stepping_handle())
    step, steps = setup.mode.step, []

    def counted_step():
        steps.append(1)
        if len(steps) == 2:
            setup.channel.waiting.append(Run([request(2, 2)]))
        if len(steps) == 3:
            setup.channel.waiting.append(Cancel([1]))
        step()

    setup.mode.step = counted_step
    channel = setup.serve()
    assert channel.parts(2) == [(b"1", False), (b"2", True)]
    assert channel.failures == [([1], 499)]
    assert len(channel.parts(1)) == 3


def test_generation_is_closed_at_the_end_and_when_a_step_keeps_failing():
    setup = Setup("generation", Stop())
    setup.serve()
    assert setup.generation.is_closed
    broken = Setup("generation", Run([request(1)]), Run([request(2)]))
    broken.generation.step = lambda: 1 // 0
    broken.channel.poll = lambda: type(broken.channel.waiting)()  # one job at a time
    with pytest.raises(ZeroDivisionError):
        broken.serve()
    assert broken.channel.failures == [([1], 503), ([2], 503)]
    assert broken.generation.is_closed


def test_results_of_jobs_that_advance_during_a_call_are_sent_at_once():
    setup = Setup("generation")
    setup.mode.run(Run([request(1, 2)]))
    setup.generation.on_results(setup.generation.step())
    assert setup.channel.parts(1) == [(b"1", False)]


# ---- other ----


def test_follower_follows_and_receives_no_messages():
    setup = Setup("follower", Run([request(1)]))
    setup.serve()
    assert setup.generation.has_followed
    assert len(setup.channel.waiting) == 1


@pytest.mark.parametrize(
    ("mode", "ready"),
    [
        ("batches", Ready(can_share_memory=True, abilities=["embed"])),
        ("pipeline", Ready(can_share_memory=True, depth=3, abilities=["embed"])),
        ("async", Ready(can_share_memory=True, is_concurrent=True, abilities=["embed"])),
        ("continuous", Ready(can_share_memory=True, is_concurrent=True, is_continuous=True, abilities=["embed"])),
        ("generation", GENERATING),
        ("follower", GENERATING),
    ],
)
def test_mode_announces_what_it_takes(mode, ready):
    setup = Setup(mode)
    setup.close()
    assert setup.mode.ready() == ready


def test_worker_without_a_load_message_exits_with_an_error():
    assert serve(FakeChannel()) == 1
    assert serve(FakeChannel(Stop())) == 1


def test_follower_rank_sends_neither_bodies_nor_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(tmp_path)
    source = "def handle(data, c):\n    c.metrics.add_counter('seen', 1)\n    return data and ['x']\n"
    (tmp_path / "ranked.py").write_text(source)
    load = Load("m", "1.0", str(tmp_path), "ranked.py", 4, None, True, True, 1000, rank=1, keeps_step=True)
    channel = FakeChannel(load, Run([request(1)]), Stop())
    assert serve(channel) == 0
    assert channel.sent == [Ready(), Part(1, b"")]


# ---- clients that do not read ----


def test_generators_of_clients_that_read_go_on_beside_one_that_waits():
    """The pause arrives with the first chunk; the other stream runs to its end before the first goes on."""

    def handle(rows, context):
        def chunks(name):
            for i in range(3):
                setup.channel.waiting.extend([Flow(1, True)] if (name, i) == ("a", 0) else [])
                setup.channel.waiting.extend([Flow(1, False)] if (name, i) == ("b", 2) else [])
                setup.mode._outbox.poll_cancellations()
                yield f"{name}{i}"

        return [chunks("a"), chunks("b")]

    setup = Setup("batches", Run([request(1), request(2)]), handle=handle)
    setup.serve()
    bodies = [part.body for part in setup.channel.sent if isinstance(part, Part)]
    assert bodies.index(b"b2") < bodies.index(b"a1")
    assert setup.channel.parts(1)[-1] == (b"", True)


def test_an_async_generator_waits_while_others_run():
    order = []

    async def handle(rows, context):
        name = rows[0]["body"]
        for i in range(3):
            order.append((name, i))
            yield [f"{i}"]
            if name == 1 and i == 0:
                setup.mode._outbox.set_flow(Flow(1, True))
            if name == 2 and i == 2:
                setup.mode._outbox.set_flow(Flow(1, False))
            await asyncio.sleep(0)

    setup = Setup("async", Run([request(1)]), Run([request(2, 2)]), Stop(), handle=handle)
    setup.serve()
    assert order.index((2, 2)) < order.index((1, 2))
    assert len(setup.channel.parts(1)) == 4
