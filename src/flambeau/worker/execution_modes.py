"""The modes of a worker: batches one after another, pipelined, async, continuous, generation, follower."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Full, Queue
from typing import Any, NoReturn

from msgspec.structs import replace

from flambeau.wire.messages import Failed, Part, Ready, Request, Run, Work
from flambeau.worker.blocking_calls import BlockingCallMonitor
from flambeau.worker.context import Context
from flambeau.worker.failures import to_failed
from flambeau.worker.generation import Generation, StepResult
from flambeau.worker.inputs import Row, types_of
from flambeau.worker.loop import BatchRunner, Mode, WorkerLoop, is_stream
from flambeau.worker.model import LoadedModel, ModeName
from flambeau.worker.outbox import PAUSE_S, BatchStart, Outbox
from flambeau.worker.results import check_result, stream_goes_on

logger = logging.getLogger(__name__)

PIPELINE_DEPTH = 3  # batches in flight: one in inference, one prepared, one in preprocess
REPORT_S = 0.5  # between two reports of an engine's load
HEARTBEAT_S = 1.0  # between signs of life while jobs run and nothing of their replies is sent
MAX_FAILED_STEPS = 2  # in a row, before the process exits


class BatchMode(Mode):
    """One batch after another."""

    has_work = False  # an attribute, not a property, and `run` without a method around it: the hot path

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        super().__init__(model, runner, outbox)
        self.run = runner.run  # type: ignore[method-assign]
        self.cancel = outbox.forget_cancelled  # type: ignore[method-assign]  # the jobs before a Cancel are over


class PipelineMode(Mode):
    """One batch after another; a second thread receives and prepares the next one meanwhile."""

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        super().__init__(model, runner, outbox)
        assert model.pipeline is not None
        self._prepare, self._complete = model.pipeline
        self._prepared: Queue[Callable[[], None] | None] = Queue(maxsize=1)

    def ready(self) -> Ready:
        return replace(super().ready(), depth=PIPELINE_DEPTH)

    def serve(self, loop: WorkerLoop) -> None:
        thread = threading.Thread(target=self._receive, args=(loop,), daemon=True, name="preprocess")
        self._outbox.reader = thread
        self._outbox.has_own_reader = True
        thread.start()
        while (work := self._prepared.get()) is not None:
            work()

    def _receive(self, loop: WorkerLoop) -> None:
        try:
            loop.run()
            self._prepared.put(None)
        except BaseException as error:  # an exit of the handler, say, must end the process and not only this thread
            self._prepared.put(partial(raise_error, error))

    def run(self, run: Run) -> None:
        first = run.jobs[0]
        if first.kind != "predict" or first.envelope:
            self._put(partial(self._runner.run, run))
            return
        began = time.monotonic()
        context = self._runner.new_context()
        if rows := self._runner.begin(context, run.jobs):
            try:
                call = partial(self._complete, self._prepare(rows), context)
            except Exception as error:
                call = partial(raise_error, error)
            self._put(partial(self._runner.answer, context, call, began, self._outbox.clock.take_preprocess()))

    def _put(self, work: Callable[[], None]) -> None:
        """Pass work on; until there is room, receive the cancellations and pauses of the batch before it."""
        while True:
            try:
                self._prepared.put(work, timeout=PAUSE_S)
                return
            except Full:
                self._outbox.poll_cancellations()

    def cancel(self, job_ids: Sequence[int]) -> None:
        self._outbox.cancel(job_ids)


def raise_error(error: BaseException) -> NoReturn:
    raise error


class AsyncMode(Mode):
    """Each batch is a task on the event loop, beside others."""

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        super().__init__(model, runner, outbox)
        self._event_loop = model.event_loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._monitor = BlockingCallMonitor(self._event_loop, self._tasks)

    def ready(self) -> Ready:
        return replace(super().ready(), is_concurrent=True)

    def serve(self, loop: WorkerLoop) -> None:
        self._event_loop.run_until_complete(self._serve(loop))

    async def _serve(self, loop: WorkerLoop) -> None:
        stopped = asyncio.Event()

        def handle_arrived() -> None:
            loop.handle_arrived()
            if loop.is_stopping:
                stopped.set()

        self._event_loop.add_reader(loop.channel.socket, handle_arrived)
        # Polling for cancellations may take other messages out of the socket, which is then no longer readable.
        self._outbox.on_arrived = lambda: self._event_loop.call_soon(handle_arrived)
        self._monitor.start()
        handle_arrived()
        await stopped.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._event_loop.remove_reader(loop.channel.socket)

    def run(self, run: Run) -> None:
        self._outbox.open(run.jobs)
        task = self._event_loop.create_task(self._runner.run_async(run))
        self._tasks.add(task)
        self._monitor.on_job()
        task.add_done_callback(self._tasks.discard)

    def cancel(self, job_ids: Sequence[int]) -> None:
        self._outbox.cancel(job_ids)


class ContinuousMode(Mode):
    """One batch that lasts: each call of the handler is a step, and requests join and leave between steps.

    The server sends no more requests than there are places, so a step takes all that are here.
    """

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        super().__init__(model, runner, outbox)
        self._running: list[Request] = []
        self._joining: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._joining)

    def ready(self) -> Ready:
        return replace(super().ready(), is_concurrent=True, is_continuous=True)

    def run(self, run: Run) -> None:
        if run.jobs[0].kind != "predict":  # explain and describe run alone, between two steps
            self._runner.run(run)
            return
        self._outbox.open(run.jobs)
        self._joining += run.jobs

    def cancel(self, job_ids: Sequence[int]) -> None:
        self._outbox.cancel(job_ids)
        is_rejected = self._outbox.reject_cancelled
        self._running = [request for request in self._running if not is_rejected(request)]
        self._joining = [request for request in self._joining if not is_rejected(request)]
        self._outbox.forget_cancelled(job_ids)

    def step(self) -> None:
        """Call the handler once: a request that joins brings its data, a running one an empty row."""
        context = self._runner.context
        requests: list[Request] = [*self._running]
        rows: list[Row] = [{} for _ in requests]
        types: list[dict[str, str] | None] = [{} for _ in requests]
        for request in self._joining:
            if (row := self._runner.read(request)) is not None:
                requests.append(request)
                rows.append(row)
                types.append(types_of(row))
        self._running, self._joining = [], []
        if not requests:
            return
        context.begin(requests, types)
        try:
            called = time.monotonic()
            self._reply(context, self._runner.handle(rows, context), (called, called, None))
        except Exception as error:  # the handler's state of the other requests cannot be trusted either
            self._running = []
            self._runner.fail(requests, error)
        self._outbox.send_samples(context)

    def _reply(self, context: Context, result: Any, start: BatchStart) -> None:
        if is_stream(result) or (isinstance(result, list) and any(map(is_stream, result))):
            self._runner.reply(context, result, start)  # generators run to their end
            return
        values = check_result(result, len(context.requests))
        lasts = [not stream_goes_on(context, i, value) for i, value in enumerate(values)]
        self._outbox.send_step(context, values, lasts)
        self._running = [request for request, last in zip(context.requests, lasts, strict=True) if not last]
        os.sched_yield()  # the kernel tends to wake the server on this core: let it send the parts now


class GenerationMode(Mode):
    """A handler that generates: jobs join and leave between the steps of its engine."""

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        super().__init__(model, runner, outbox)
        assert model.generation is not None
        self._generation = model.generation
        self._joined: dict[int, tuple[Request, float]] = {}  # job id → its request, and when it joined
        self._num_failed_steps = 0  # in a row
        self._sent_at = 0.0
        self._reported_at = 0.0
        self._generation.on_results = self._send

    @property
    def has_work(self) -> bool:
        return self._generation.has_work

    def ready(self) -> Ready:
        return ready_to_generate(super().ready(), self._generation)

    def serve(self, loop: WorkerLoop) -> None:
        try:
            loop.run()
        finally:
            self._generation.close()

    def run(self, run: Run) -> None:
        for request in run.jobs:
            self._join(request)

    def _join(self, request: Request) -> None:
        if request.kind not in ("predict", "generate", "tokenize", "adapter") or request.envelope:
            self._runner.run(Run([request]))  # alone, between two steps
            return
        began = time.monotonic()
        self._outbox.open([request])
        row = self._runner.read(request)
        if row is None:
            return
        self._runner.context.begin([request], [types_of(row)])
        try:
            if request.kind != "tokenize":
                self._generation.join(request, row)
            elif (body := self._generation.tokenize(request, row["body"])) is not None:
                self._outbox.send_messages(self._runner.context, [Part(request.job_id, body)])
                return
        except Exception as error:
            self._outbox.fail([request], error)
        else:
            self._joined[request.job_id] = (request, began)

    def cancel(self, job_ids: Sequence[int]) -> None:
        for job_id in job_ids:
            if self._outbox.abandon(job_id):
                self._remove(job_id)
        self._outbox.forget_cancelled(job_ids)

    def step(self) -> None:
        if not self._generation.has_work:  # the last job was cancelled a moment ago
            return
        try:
            results = self._generation.step()
        except Exception as error:
            self._fail_all(error)
            return
        self._num_failed_steps = 0
        self._send(results)

    def _send(self, results: Sequence[StepResult]) -> None:
        now = time.monotonic()
        if now - self._reported_at > REPORT_S or not self._generation.has_work:
            self._report(now)
        if results:
            messages = [
                result if type(result) is Part and not result.last else self._to_message(result, now)
                for result in results
            ]
            self._outbox.send_messages(self._runner.context, messages)
            self._sent_at = now
        elif now - self._sent_at > HEARTBEAT_S:
            self._outbox.send_heartbeat()
            self._sent_at = now

    def _report(self, now: float) -> None:
        """Send the engine's load; before the results of its last step, so that a client finds its request counted."""
        if (report := self._generation.report()) is not None:
            self._outbox.send_report(report)
            self._reported_at = self._sent_at = now

    def _to_message(self, result: StepResult, now: float) -> Part | Failed:
        if isinstance(result, tuple):
            job_id, error = result
            self._joined.pop(job_id, None)
            return to_failed([job_id], error)
        if result.last and result.job_id in self._joined:
            _, began = self._joined.pop(result.job_id)
            made = None if result.work is None else result.work.generation
            pauses = self._outbox.pauses.since(began)
            return replace(result, work=Work(began, now, 0.0, now - began, None, made, pauses))
        return result

    def _fail_all(self, error: Exception) -> None:
        """Fail every job: after a failed step no job's state can be trusted, and the next jobs start anew.

        When steps keep failing, the error ends the process: the cause is not in the requests.
        """
        logger.exception("a step of the generation failed, with %d requests in it", len(self._joined))
        self._outbox.fail([request for request, _ in self._joined.values()], error)
        for job_id in [*self._joined]:
            self._remove(job_id)
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS or self._generation.has_work:
            raise error

    def _remove(self, job_id: int) -> None:
        if self._joined.pop(job_id, None) is not None:
            self._generation.cancel(job_id)


class FollowerMode(Mode):
    """A rank other than 0 of a generation: rank 0 drives it, and the server sends it no jobs."""

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        super().__init__(model, runner, outbox)
        assert model.generation is not None
        self._generation = model.generation

    def ready(self) -> Ready:
        return ready_to_generate(super().ready(), self._generation)

    def serve(self, loop: WorkerLoop) -> None:
        self._generation.follow()


def ready_to_generate(ready: Ready, generation: Generation) -> Ready:
    return replace(
        ready,
        is_concurrent=True,
        places=generation.places,
        abilities=[*generation.abilities],
        max_length=generation.max_length,
        adapters=[*generation.adapters],
    )


MODES: dict[ModeName, type[Mode]] = {
    "batches": BatchMode,
    "pipeline": PipelineMode,
    "async": AsyncMode,
    "continuous": ContinuousMode,
    "generation": GenerationMode,
    "follower": FollowerMode,
}
