"""A worker's whole life: load, then run batches: one after another, one ahead of another, or many at a time."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from flambeau import __version__
from flambeau.archive.model_folder import manifest_of
from flambeau.config.model import read_options
from flambeau.errors import HandlerError
from flambeau.metrics.definitions import Definition
from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Cancel, Load, Ready, Run, Samples, Schedule, Stop
from flambeau.worker.context import Context, new_metrics
from flambeau.worker.continuous import RunningBatch
from flambeau.worker.envelopes import Handle
from flambeau.worker.failures import load_failed
from flambeau.worker.generating import GeneratingLoop, generation_of, ready_to_generate
from flambeau.worker.inputs import InputReader
from flambeau.worker.loader import Entry, in_envelope, load_handler
from flambeau.worker.quiet import QuietChannel
from flambeau.worker.replier import Replier, samples_of
from flambeau.worker.runner import Runner
from flambeau.worker.warmup import read_warmup, warm_up

logger = logging.getLogger(__name__)

Prepare = Callable[[Any], Any]
Complete = Callable[[Any, Context], Any]
PIPELINE_DEPTH = 3  # batches on their way: one that is computed, one that is prepared, one that is being prepared


def serve(channel: WorkerChannel) -> int:
    """Load the model the server names and run its batches; return the exit status."""
    load = channel.receive()
    if not isinstance(load, Load):
        return 1
    if load.rank > 0:
        channel = QuietChannel(channel)
    with closing(asyncio.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)  # a handler may use it in `initialize`, and finds the same one later
        try:
            context = new_context(load)
            entry = loader_for(load)(load.handler, Path(load.folder), context, loop)
            entry = in_envelope(entry, load.envelope, Path(load.folder))
            # Code that may change at any time is not cut into halves.
            is_pipelined = context.model_yaml_config.get("pipeline") and not load.watch and load.schedule == "batches"
            pipeline = pipeline_of(entry) if is_pipelined else None
            reader = InputReader(decode=load.decode_input)
            generation = generation_of(entry, load.schedule)
            warmup = read_warmup(context.model_yaml_config, Path(load.folder), load.batch_size)
            if warmup and not (generation and load.rank):  # rank 0 calls upon the others itself
                warm_up(entry, context, reader, loop, warmup)
        except (Exception, SystemExit) as error:
            channel.send([load_failed(error, may_change=load.watch)])
            return 1
        entry = entry if generation else as_scheduled(entry, load.schedule, loop)
        is_continuous = load.schedule == "continuous"
        can_share_memory = reader.segments.can_read(load.probe)
        if generation is not None:
            ready = ready_to_generate(generation, can_share_memory=can_share_memory)
        else:
            depth = PIPELINE_DEPTH if pipeline else 1
            is_concurrent = entry.is_concurrent or is_continuous
            abilities = [] if entry.envelope else [*entry.abilities]
            ready = Ready(is_concurrent, can_share_memory, depth, is_continuous, abilities=abilities)
        samples = samples_of(context)  # of `initialize`
        channel.send([Samples(samples), ready] if samples else [ready])
        replier = Replier(channel, load.max_response_bytes, may_split=may_split(load))
        runner = Runner(
            entry.handle,
            reader,
            context,
            replier,
            wrap=partial(wrapped, entry, Path(load.folder)),
            new_context=Context.isolated if load.schedule == "async" else copy.copy,
        )
        if generation is not None and load.rank > 0:
            generation.follow()
        elif generation is not None:
            GeneratingLoop(channel, runner, replier, generation).run()
        elif is_continuous:
            RunningBatch(channel, runner, replier).run()
        elif entry.is_concurrent:
            loop.run_until_complete(run_concurrently(channel, runner, replier))
        elif pipeline:
            run_pipelined(channel, runner, replier, *pipeline)
        else:
            run_batches(channel, runner, replier)
    return 0


def may_split(load: Load) -> bool:
    """Whether a batch that failed may be run again, request by request: not where the handler keeps state of a
    request, nor where the ranks of a group must all make the same calls.
    """
    return load.schedule in ("batches", "async") and not load.keeps_step


def loader_for(load: Load) -> Callable[..., Entry]:
    """How this worker's handler is loaded; only those who watch their code pay for the watching."""
    if not load.watch:
        return load_handler
    from flambeau.worker.watching import load_watched

    return load_watched


def wrapped(entry: Entry, folder: Path, envelope: str) -> Handle:
    """A handler's entry point in an envelope that a request asks for."""
    return in_envelope(entry, envelope, folder).handle


def as_scheduled(entry: Entry, schedule: Schedule, loop: asyncio.AbstractEventLoop) -> Entry:
    """The handler as this model's jobs need it: what must come one after another is not run side by side."""
    if schedule == "async" and not entry.is_concurrent:
        logger.warning("asyncCommunication needs an `async def handle`; this one is called for one request at a time")
    if schedule in ("batches", "async") or not entry.is_concurrent:
        return entry
    handle = entry.handle

    def handle_to_the_end(data: Any, context: Context) -> Any:
        result: Any = handle(data, context)
        if inspect.isasyncgen(result):
            return drawn(result, loop)
        return loop.run_until_complete(result) if inspect.isawaitable(result) else result

    return replace(entry, handle=handle_to_the_end, is_concurrent=False)


def drawn(chunks: AsyncGenerator[Any, Any], loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """What an asynchronous generator yields, one after another."""
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(chunks))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(chunks.aclose())


def pipeline_of(entry: Entry) -> tuple[Prepare, Complete]:
    """The two halves of a handler that can prepare one batch while it computes another."""
    if entry.envelope:
        raise HandlerError(f"pipeline: true does not go with an envelope ({entry.envelope}); leave one of them out")
    if not hasattr(entry.handler, "pipeline"):
        raise HandlerError("pipeline: true needs a handler that builds on BaseHandler, with its stages")
    halves: tuple[Prepare, Complete] = entry.handler.pipeline()
    return halves


def new_context(load: Load) -> Context:
    """The context of this worker's handler."""
    folder = Path(load.folder)
    manifest = manifest_of(folder)
    options = read_options(folder / manifest.config_file) if manifest and manifest.config_file else {}
    return Context(
        load.model,
        load.folder,
        dict(manifest.raw) if manifest else None,
        load.batch_size,
        load.gpu_id,
        __version__,
        load.limit_max_image_pixels,
        new_metrics(load.model, load.metrics_file, (Definition(n, k, u, tuple(d)) for n, k, u, d in load.metrics)),
        options,
    )


def run_batches(channel: WorkerChannel, runner: Runner, replier: Replier) -> None:
    """Run batches one after another, until the server says stop or is gone."""
    while (message := channel.receive()) is not None:
        if type(message) is Run:
            runner.run(message)
        elif type(message) is Cancel:
            replier.forget_cancelled(message.job_ids)
        elif type(message) is Stop:
            return


def run_pipelined(
    channel: WorkerChannel, runner: Runner, replier: Replier, prepare: Prepare, complete: Complete
) -> None:
    """As `run_batches`, but a second thread reads and prepares the next batch meanwhile."""
    prepared: Queue[Callable[[], None] | None] = Queue(maxsize=1)

    def prepare_all() -> None:
        try:
            prepare_until_stop()
            prepared.put(None)
        except BaseException as error:  # an exit, say: it has to end the process, not only this thread
            prepared.put(partial(fail, error))

    def prepare_until_stop() -> None:
        while (message := channel.receive()) is not None and type(message) is not Stop:
            if type(message) is Cancel:
                replier.note_cancelled(message.job_ids)
            elif type(message) is Run and (message.jobs[0].kind != "predict" or message.jobs[0].envelope):
                prepared.put(partial(runner.run, message))
            elif type(message) is Run:
                context = runner.new_context()
                if rows := runner.begin(context, message.jobs):
                    try:
                        call = partial(complete, prepare(rows), context)
                    except Exception as error:
                        call = partial(fail, error)
                    prepared.put(partial(runner.answer, context, call))

    thread = threading.Thread(target=prepare_all, daemon=True, name="preprocess")
    replier.reader = thread  # the channel is read by this one only
    thread.start()
    while (work := prepared.get()) is not None:
        work()


def fail(error: BaseException) -> None:
    """Fail later, where failures are answered."""
    raise error


async def run_concurrently(channel: WorkerChannel, runner: Runner, replier: Replier) -> None:
    """As `run_batches`, but each batch is a task of its own."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def take() -> None:
        arrived = channel.poll()
        while arrived:
            message = arrived.popleft()
            if type(message) is Run:
                replier.open(message.jobs)
                task = loop.create_task(runner.run_async(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            elif type(message) is Cancel:
                replier.note_cancelled(message.job_ids)
            elif type(message) is Stop:
                stopped.set()

    loop.add_reader(channel.socket, take)
    # Whoever polls for cancellations may draw other messages out of the socket, which then stays silent.
    replier.wake = lambda: loop.call_soon(take)
    take()
    await stopped.wait()
    if tasks:
        await asyncio.wait(tasks)
    loop.remove_reader(channel.socket)
