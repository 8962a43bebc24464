"""WorkerLoop: receives messages and hands them to a mode. BatchRunner: runs a batch through the handler."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flambeau.errors import BadRequest
from flambeau.wire.messages import Cancel, Flow, Ready, Request, Run, Stop, ToWorker
from flambeau.worker.code_places import place_of
from flambeau.worker.context import Context
from flambeau.worker.failures import explain, is_explained
from flambeau.worker.handler_mistakes import explain_split
from flambeau.worker.inputs import InputReader, Row, read_headers, types_of
from flambeau.worker.loader import Handle
from flambeau.worker.model import LoadedModel
from flambeau.worker.outbox import PAUSE_S, BatchStart, Channel, Outbox
from flambeau.worker.results import CHUNKS_OF_JSON, BadResult, check_chunk, check_result

logger = logging.getLogger(__name__)

GENERATES_NOTHING = "The model generates no text; its handler must be gpt_handler, or another that generates."


class BatchRunner:
    """Reads the inputs of a batch, calls the handler and sends the replies."""

    def __init__(
        self,
        handle: Handle,
        reader: InputReader,
        context: Context,
        outbox: Outbox,
        *,
        wrap: Callable[[str], Handle] | None = None,
        new_context: Callable[[Context], Context] = copy.copy,
    ) -> None:
        self.handle = handle
        self.context = context
        self._wrap = wrap
        self._wrapped: dict[str, Handle] = {}
        self._reader = reader
        self._outbox = outbox
        self._new_context = new_context
        self._num_failures = 0  # calls of `fail`
        self._has_warned_of_batches = False
        self._has_warned_of_chunks = False
        context.connect(outbox, read_headers)

    def _handle_in(self, envelope: str) -> Handle:
        if not envelope or self._wrap is None:
            return self.handle
        if envelope not in self._wrapped:
            self._wrapped[envelope] = self._wrap(envelope)
        return self._wrapped[envelope]

    def new_context(self) -> Context:
        """A context for a batch that runs beside others."""
        context = self._new_context(self.context)
        context.metrics = copy.copy(context.metrics)  # each batch measures for its own requests
        return context

    def read(self, request: Request) -> Row | None:
        """The input of a request; None if it is invalid, and the job has failed."""
        try:
            return self._reader.read(request)
        except Exception as error:
            self._outbox.fail([request], error)
            return None

    def begin(self, context: Context, jobs: Sequence[Request]) -> list[Row]:
        """Open the jobs and read their inputs; cancelled jobs and those with invalid input are answered here."""
        self._outbox.poll_before_batch()
        rows, requests = [], []
        for request in jobs:
            if self._outbox.reject_cancelled(request):
                continue
            self._outbox.open([request])
            # Front ends learn what a model can do when it is loaded.
            if request.kind in ("generate", "tokenize", "adapter"):
                self._outbox.fail([request], BadRequest(GENERATES_NOTHING))
            elif (row := self.read(request)) is not None:
                rows.append(row)
                requests.append(request)
        context.begin(requests, [types_of(row) for row in rows])
        return rows

    def fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """Fail the requests that are open. One whose body cannot be decoded is the cause itself, and is told so."""
        self._num_failures += 1
        self._locate(error)
        if isinstance(error, BadRequest) or (isinstance(error, Exception) and not is_explained(error)):
            for request in requests:
                if problem := self._reader.problem_of(request, is_rejected=isinstance(error, BadRequest)):
                    self._outbox.fail([request], BadRequest(problem))
        self._outbox.fail(requests, error)

    def _locate(self, error: BaseException) -> None:
        if isinstance(error, BadResult) and not error.place:
            error.place = place_of(self.handle)

    def _warn_of_split(self, error: BaseException, count: int, *, has_succeeded: bool) -> None:
        """Say once that the handler cannot batch: its requests succeed one by one, or its result is invalid."""
        if self._has_warned_of_batches or not (has_succeeded or isinstance(error, BadResult)):
            return
        self._has_warned_of_batches = True
        self._locate(error)
        logger.warning("%s", explain_split(error, count, explain(error), has_succeeded=has_succeeded))

    def _warn_of_chunks(self) -> None:
        if not self._has_warned_of_chunks:
            self._has_warned_of_chunks = True
            logger.warning("%s %s", place_of(self.handle), CHUNKS_OF_JSON)

    # ---- one batch at a time ----

    def run(self, run: Run) -> None:
        began = time.monotonic()
        context = self.context
        rows = self.begin(context, run.jobs)
        if rows:
            self.answer(context, lambda: self._handle_in(run.jobs[0].envelope)(rows, context), began)

    def answer(
        self, context: Context, call: Callable[[], Any], began: float, preprocess_s: float | None = None
    ) -> None:
        """Call the handler and send what it returns. With `preprocess_s`, that stage ran before the call."""
        start = (began, time.monotonic(), preprocess_s)
        failure: Exception | None = None
        try:
            result = call()
            if type(result) is list and len(result) == len(context.requests) and not any(map(is_stream, result)):
                self._outbox.finish(context, result, start)  # with the samples
                return
            self.reply(context, result, start)
        except Exception as error:
            self._outbox.clock.take(preprocess_s)  # the next batch begins with zero
            if self._outbox.can_split(context):
                failure = error
            else:
                self.fail(context.requests, error)
        if failure is not None:  # outside of `except`: the errors of single requests do not follow from this one
            self._run_one_by_one(context, failure)
            return
        self._outbox.send_samples(context)

    def _run_one_by_one(self, context: Context, error: Exception) -> None:
        requests, failures = [*context.requests], self._num_failures
        for request in requests:
            self.run(Run([request]))
        self._warn_of_split(error, len(requests), has_succeeded=self._num_failures == failures)

    def reply(self, context: Context, result: Any, start: BatchStart) -> None:
        """Send a result that is no plain list: a generator for the batch, or generators in the list."""
        began, called, preprocess_s = start
        self._outbox.clock.take(preprocess_s)  # a stage that returns a generator has not done its work yet
        start = (began, called, None)
        if inspect.isgenerator(result):
            self._stream_batch(context, result, start)
            return
        values = check_result(result, len(context.requests))
        self._stream_each(context, values)

    def _stream_batch(self, context: Context, chunks: Iterator[Any], start: BatchStart) -> None:
        """Send each item as one chunk for every request; the end of the generator ends all replies."""
        try:
            for item in chunks:
                values = as_values(context, item)
                if type(item) is dict and context.has_sent:
                    self._warn_of_chunks()
                self._outbox.send_values(context, values, verb="yielded")
                if self._outbox.all_cancelled(context):
                    break
        finally:
            chunks.close()  # type: ignore[attr-defined]
        self._outbox.finish(context, [b""] * len(context.requests), start)

    def _stream_each(self, context: Context, values: Sequence[Any]) -> None:
        """Advance the generators in turn; send plain values at once."""
        streams: dict[int, Iterator[Any]] = {}
        context.has_sent = True
        for i, value in enumerate(values):
            if is_stream(value):
                streams[i] = value
            else:
                self._outbox.send(context, i, value, last=True)
        while streams:
            for i, stream in [*streams.items()]:
                job_id = context.requests[i].job_id
                if self._outbox.is_paused(job_id):
                    continue
                try:
                    self._outbox.send(context, i, check_chunk(next(stream)), last=False)
                    if self._outbox.is_cancelled(job_id):
                        stream.close()  # type: ignore[attr-defined]
                except StopIteration:
                    del streams[i]
                    self._outbox.send(context, i, b"", last=True)
                except Exception as error:  # the other streams continue
                    del streams[i]
                    self.fail([context.requests[i]], error)
            if self._outbox.has_paused:
                self._outbox.wait_for_clients([context.requests[i] for i in streams])

    # ---- many batches at a time ----

    async def run_async(self, run: Run) -> None:
        """Run a batch of an `async def` handler."""
        began = time.monotonic()
        context = self.new_context()
        rows = self.begin(context, run.jobs)
        if not rows:
            return
        start = (began, time.monotonic(), None)
        try:
            result: Any = self._handle_in(run.jobs[0].envelope)(rows, context)
            if inspect.isawaitable(result):
                result = await result
            if inspect.isasyncgen(result):
                async for item in result:
                    values = as_values(context, item)
                    if type(item) is dict and context.has_sent:
                        self._warn_of_chunks()
                    self._outbox.send_values(context, values, verb="yielded")
                    if self._outbox.all_cancelled(context):
                        await result.aclose()
                        break
                    while self._outbox.all_paused(context.requests):
                        await asyncio.sleep(PAUSE_S)
                self._outbox.finish(context, [b""] * len(context.requests), start)
            else:
                self._outbox.finish(context, check_result(result, len(rows)), start)
        except (Exception, asyncio.CancelledError) as error:
            if self._outbox.can_split(context):
                requests, failures = [*context.requests], self._num_failures
                for request in requests:
                    await self.run_async(Run([request]))
                self._warn_of_split(error, len(requests), has_succeeded=self._num_failures == failures)
                return
            self.fail(context.requests, error)
        self._outbox.send_samples(context)


def as_values(context: Context, item: Any) -> Sequence[Any]:
    """The item of a generator as one value for each request; with one request it may come without a list."""
    return item if isinstance(item, list) or len(context.requests) > 1 else [item]


def is_stream(value: Any) -> bool:
    return inspect.isgenerator(value)


class Mode:
    """How a worker runs its jobs. The loop calls `run` and `cancel` for messages, and `step` while there is work."""

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        self._model = model
        self._runner = runner
        self._outbox = outbox

    @property
    def has_work(self) -> bool:
        """Whether jobs wait for the next step; False in modes without steps."""
        return False

    def ready(self) -> Ready:
        """What the server needs to know before it sends jobs."""
        tensors = self._model.tensors
        return Ready(
            can_share_memory=self._model.can_share_memory,
            abilities=[*self._model.abilities],
            inputs=[*tensors.inputs],
            outputs=[*tensors.outputs],
            example=self._model.handler.example,
        )

    def serve(self, loop: WorkerLoop) -> None:
        """Drive the loop until it ends."""
        loop.run()

    def run(self, run: Run) -> None:
        raise NotImplementedError

    def cancel(self, job_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def set_flow(self, flow: Flow) -> None:
        """Pause a job, or let it go on. Steps serve many jobs, so only generators wait for clients."""
        self._outbox.set_flow(flow)

    def step(self) -> None:
        raise NotImplementedError


class WorkerLoop:
    """The only place that tells Run, Cancel, Flow and Stop apart."""

    def __init__(self, channel: Channel, mode: Mode) -> None:
        self.channel = channel
        self.is_stopping = False
        self._mode = mode

    def run(self) -> None:
        """Handle messages until the server sends Stop, and finish what was begun; or until the server is gone."""
        receive, mode = self.channel.receive, self._mode
        while not self.is_stopping and (message := receive()) is not None:
            self.handle(message)
            while mode.has_work:
                self.handle_arrived()
                mode.step()

    def handle_arrived(self) -> None:
        """Handle every message that has arrived, without waiting."""
        arrived = self.channel.poll()
        while arrived:
            self.handle(arrived.popleft())

    def handle(self, message: ToWorker) -> None:
        if type(message) is Run:
            self._mode.run(message)
        elif type(message) is Cancel:
            self._mode.cancel(message.job_ids)
        elif type(message) is Flow:
            self._mode.set_flow(message)
        elif type(message) is Stop:
            self.is_stopping = True
