"""A worker's whole life: load, then run batches one after another, or concurrently for `async def` handlers."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any

from flambeau import __version__
from flambeau.archive.manifest import read_manifest
from flambeau.config.model import read_options
from flambeau.errors import HandlerError
from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Request, Run, Samples, Stop
from flambeau.worker.context import Context
from flambeau.worker.failures import load_failed, to_failed
from flambeau.worker.inputs import InputReader, Row, read_headers, types_of
from flambeau.worker.loader import Entry, in_envelope, load_handler
from flambeau.worker.replies import check_result, check_size, to_body, to_part, to_parts
from flambeau.worker.warmup import read_warmup, warm_up
from flambeau.worker.watching import load_watched

CANCELLED = 499
PIPELINE_DEPTH = 3  # batches on their way: one that is computed, one that is prepared, one that is being prepared
LOOK_EVERY_S = 0.001


def serve(channel: WorkerChannel) -> int:
    """Load the model the server names and run its batches; return the exit status."""
    load = channel.receive()
    if not isinstance(load, Load):
        return 1
    with closing(asyncio.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)  # a handler may use it in `initialize`, and finds the same one later
        try:
            context = new_context(load)
            entry = (load_watched if load.watch else load_handler)(load.handler, Path(load.folder), context, loop)
            entry = in_envelope(entry, load.envelope, Path(load.folder))
            # Code that may change at any time is not cut into halves.
            pipeline = pipeline_of(entry) if context.model_yaml_config.get("pipeline") and not load.watch else None
            reader = InputReader(decode=load.decode_input)
            if warmup := read_warmup(context.model_yaml_config, Path(load.folder), load.batch_size):
                warm_up(entry, context, reader, loop, warmup)
        except (Exception, SystemExit) as error:
            channel.send([load_failed(error)])
            return 1
        depth = PIPELINE_DEPTH if pipeline else 1
        channel.send([Ready(entry.is_concurrent, reader.segments.can_read(load.probe), depth)])
        runner = Runner(channel, reader, context, entry, load.max_response_bytes)
        if entry.is_concurrent:
            loop.run_until_complete(runner.run_concurrently())
        elif pipeline:
            runner.run_pipelined(*pipeline)
        else:
            runner.run_batches()
    return 0


def pipeline_of(entry: Entry) -> tuple[Callable[[Any], Any], Callable[[Any, Context], Any]]:
    """The two halves of a handler that can prepare one batch while it computes another."""
    if entry.envelope:
        raise HandlerError(f"pipeline: true does not go with an envelope ({entry.envelope}); leave one of them out")
    if not hasattr(entry.handler, "pipeline"):
        raise HandlerError("pipeline: true needs a handler that builds on BaseHandler, with its stages")
    halves: tuple[Callable[[Any], Any], Callable[[Any, Context], Any]] = entry.handler.pipeline()
    return halves


def new_context(load: Load) -> Context:
    """The context of this worker's handler."""
    folder = Path(load.folder)
    manifest = read_manifest(folder)
    options = read_options(folder / manifest.config_file) if manifest and manifest.config_file else {}
    return Context(
        load.model,
        load.folder,
        dict(manifest.raw) if manifest else None,
        load.batch_size,
        load.gpu_id,
        __version__,
        load.limit_max_image_pixels,
        model_yaml_config=options,
    )


class Runner:
    """Runs batches: reads their inputs, calls the handler, sends the replies."""

    def __init__(
        self, channel: WorkerChannel, reader: InputReader, context: Context, entry: Entry, max_response_bytes: int
    ) -> None:
        self._channel = channel
        self._reader = reader
        self._context = context
        self._handle = entry.handle
        self._max_bytes = max_response_bytes
        self._cancelled: set[int] = set()
        self._open: set[int] = set()  # jobs of ours that are not answered yet
        self._next_look = 0.0
        self._may_poll = True
        self._wake: Callable[[], object] | None = None  # only where many batches run at a time
        context.connect(self, read_headers)

    # ---- one batch after another ----

    def run_batches(self) -> None:
        """Run until the server says stop or is gone."""
        channel = self._channel
        while (message := channel.receive()) is not None:
            if type(message) is Run:
                self._run(message)
            elif type(message) is Cancel:
                self._cancelled.difference_update(message.job_ids)  # they were sent before it, so they are over
            elif type(message) is Stop:
                return

    def _run(self, run: Run) -> None:
        context = self._context
        rows = self._begin(context, run.jobs)
        if rows:
            self._answer(context, lambda: self._handle(rows, context))

    def _answer(self, context: Context, call: Callable[[], Any]) -> None:
        """Call the handler and send what it returns."""
        try:
            result = call()
            if type(result) is list and len(result) == len(context.requests) and not any(map(is_stream, result)):
                self._finish(context, result)
            else:
                self._reply(context, result)
        except Exception as error:
            if self._may_try_each(context):
                for request in [*context.requests]:
                    self._run(Run([request]))
                return
            self._fail(context, error)
        self._send_samples(context)

    def _begin(self, context: Context, jobs: Sequence[Request]) -> list[Row]:
        """Read the inputs; jobs nobody waits for, or with a body that cannot be read, are answered now."""
        self._look_for_cancels()
        rows, requests = [], []
        for request in jobs:
            if request.job_id in self._cancelled:
                self._forget(request.job_id)
                self._channel.send([Failed([request.job_id], CANCELLED, "cancelled before it began")])
                continue
            try:
                rows.append(self._reader.read(request))
                requests.append(request)
            except Exception as error:
                self._forget(request.job_id)
                self._channel.send([to_failed([request.job_id], error)])
        self._open.update([request.job_id for request in requests])
        context.begin(requests, [types_of(row) for row in rows])
        return rows

    def _reply(self, context: Context, result: Any) -> None:
        """Any result but a plain list: a generator for the batch, or streams inside the list."""
        if inspect.isgenerator(result):
            self._stream_batch(context, result)
            return
        values = check_result(result, len(context.requests))
        self._stream_each(context, values)

    def _stream_batch(self, context: Context, chunks: Iterator[Any]) -> None:
        """Each item the handler yields is a chunk for every request; the end of the generator ends them."""
        try:
            for item in chunks:
                self.send_values(context, self._as_values(context, item))
                if self._all_cancelled(context):
                    break
        finally:
            chunks.close()  # type: ignore[attr-defined]
        self._finish(context, [b""] * len(context.requests))

    def _stream_each(self, context: Context, values: Sequence[Any]) -> None:
        """Generators inside the result are advanced in turn; plain values are answered at once."""
        streams: dict[int, Iterator[Any]] = {}
        context.has_sent = True
        for i, value in enumerate(values):
            if is_stream(value):
                streams[i] = value
            else:
                self._send_one(context, i, value, last=True)
        while streams:
            for i, stream in [*streams.items()]:
                job_id = context.requests[i].job_id
                try:
                    self._send_one(context, i, next(stream), last=False)
                    if self.is_cancelled(job_id):
                        stream.close()  # type: ignore[attr-defined]
                except StopIteration:
                    del streams[i]
                    self._send_one(context, i, b"", last=True)
                except Exception as error:  # the other streams of the batch go on
                    del streams[i]
                    self._channel.send([to_failed([job_id], error)])
                    self._forget(job_id)

    # ---- one prepared while another is computed ----

    def run_pipelined(self, prepare: Callable[[Any], Any], complete: Callable[[Any, Context], Any]) -> None:
        """As `run_batches`, but a second thread reads and prepares the next batch meanwhile."""
        self._may_poll = False  # the channel is read by the other thread only
        prepared: Queue[Callable[[], None] | None] = Queue(maxsize=1)
        threading.Thread(
            target=self._prepare_all, args=(prepare, complete, prepared), daemon=True, name="preprocess"
        ).start()
        while (work := prepared.get()) is not None:
            work()

    def _prepare_all(
        self,
        prepare: Callable[[Any], Any],
        complete: Callable[[Any, Context], Any],
        prepared: Queue[Callable[[], None] | None],
    ) -> None:
        while (message := self._channel.receive()) is not None and type(message) is not Stop:
            if type(message) is Cancel:
                self._cancelled.update(self._open.intersection(message.job_ids))
            elif type(message) is Run and message.jobs[0].kind != "predict":
                prepared.put(functools.partial(self._run, message))
            elif type(message) is Run:
                context = copy.copy(self._context)
                if rows := self._begin(context, message.jobs):
                    try:
                        call = functools.partial(complete, prepare(rows), context)
                    except Exception as error:
                        call = functools.partial(fail, error)
                    prepared.put(functools.partial(self._answer, context, call))
        prepared.put(None)

    # ---- many at a time ----

    async def run_concurrently(self) -> None:
        """As `run_batches`, but each batch is a task of its own."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def take() -> None:
            arrived = self._channel.poll()
            while arrived:
                message = arrived.popleft()
                if type(message) is Run:
                    self._open.update(request.job_id for request in message.jobs)
                    task = loop.create_task(self._run_async(message))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                elif type(message) is Cancel:
                    self._cancelled.update(self._open.intersection(message.job_ids))
                elif type(message) is Stop:
                    stopped.set()

        loop.add_reader(self._channel.socket, take)
        # Whoever polls for cancellations may draw other messages out of the socket, which then stays silent.
        self._wake = lambda: loop.call_soon(take)
        take()
        await stopped.wait()
        if tasks:
            await asyncio.wait(tasks)
        loop.remove_reader(self._channel.socket)

    async def _run_async(self, run: Run) -> None:
        context = copy.copy(self._context)
        rows = self._begin(context, run.jobs)
        if not rows:
            return
        try:
            result: Any = self._handle(rows, context)
            if inspect.isawaitable(result):
                result = await result
            if inspect.isasyncgen(result):
                async for item in result:
                    self.send_values(context, self._as_values(context, item))
                    if self._all_cancelled(context):
                        await result.aclose()
                        break
                self._finish(context, [b""] * len(context.requests))
            else:
                self._finish(context, check_result(result, len(rows)))
        except (Exception, asyncio.CancelledError) as error:
            if self._may_try_each(context):
                for request in [*context.requests]:
                    await self._run_async(Run([request]))
                return
            self._fail(context, error)
        self._send_samples(context)

    # ---- replies ----

    def _may_try_each(self, context: Context) -> bool:
        """Whether the requests of a failed batch can be run one by one, so that one bad request fails alone."""
        requests = context.requests
        return len(requests) > 1 and not context.has_sent and all(r.job_id in self._open for r in requests)

    def send_values(self, context: Context, values: Sequence[Any]) -> None:
        """Send one chunk to each request of the batch, now."""
        parts = to_parts(context, check_result(values, len(context.requests)), self._max_bytes, last=False)
        context.has_sent = True
        self._channel.send(parts)
        os.sched_yield()  # the kernel likes to wake the server on this very core: let it send the chunk now

    def _finish(self, context: Context, values: Sequence[Any]) -> None:
        parts = to_parts(context, values, self._max_bytes, last=True)
        self._channel.send(parts)
        for part in parts:
            self._forget(part.job_id)

    def _send_one(self, context: Context, i: int, value: Any, *, last: bool) -> None:
        job_id, processors = context.requests[i].job_id, context.touched_processors
        body = to_body(value)
        check_size(body, self._max_bytes)
        part: Part = to_part(job_id, body, processors[i] if processors else None, last=last)
        self._channel.send([part])
        if last:
            self._forget(job_id)

    def _fail(self, context: Context, error: BaseException) -> None:
        """Fail the requests of the batch that are not answered yet."""
        open_ids = [request.job_id for request in context.requests if request.job_id in self._open]
        if open_ids:
            self._channel.send([to_failed(open_ids, error)])
        for job_id in open_ids:
            self._forget(job_id)

    def _forget(self, job_id: int) -> None:
        self._open.discard(job_id)
        self._cancelled.discard(job_id)

    def _send_samples(self, context: Context) -> None:
        take = getattr(context.metrics, "take", None)
        if take is not None and (samples := take()):
            self._channel.send([Samples(samples)])

    @staticmethod
    def _as_values(context: Context, item: Any) -> Sequence[Any]:
        """What a generator yielded, as one value per request; a lone request needs no list around it."""
        return item if isinstance(item, list) or len(context.requests) > 1 else [item]

    # ---- cancellation ----

    def is_cancelled(self, job_id: int) -> bool:
        """Whether nobody waits for that job any more; looks at what has just arrived."""
        self._look_for_cancels_sometimes()
        return job_id in self._cancelled

    def _look_for_cancels(self) -> None:
        """Take note of cancellations that wait in the channel; they stay there until their turn comes."""
        if not self._may_poll:
            return
        arrived = self._channel.poll()
        for message in arrived:
            if type(message) is Cancel:
                self._cancelled.update(self._open.intersection(message.job_ids) if self._wake else message.job_ids)
        if arrived and self._wake:
            self._wake()

    def _look_for_cancels_sometimes(self) -> None:
        """The same for callers in a tight loop."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._look_for_cancels()

    def _all_cancelled(self, context: Context) -> bool:
        self._look_for_cancels_sometimes()
        return bool(self._cancelled) and all(request.job_id in self._cancelled for request in context.requests)


def fail(error: Exception) -> None:
    """Fail later, where failures are answered."""
    raise error


def is_stream(value: Any) -> bool:
    """Whether a value of a result is to be sent piece by piece."""
    return inspect.isgenerator(value)
