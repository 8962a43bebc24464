"""A worker process: connects to the server, loads one model and runs its jobs in the mode that fits it."""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flambeau.wire import stack_dumps
from flambeau.wire.channel import WorkerChannel
from flambeau.wire.log_records import WorkerFormatter
from flambeau.wire.messages import Load, Samples
from flambeau.wire.tls import (
    HEARTBEAT_S,
    HEARTBEAT_VARIABLE,
    LOCAL_VARIABLE,
    MAX_FRAME_BYTES,
    PIN_VARIABLE,
    TOKEN_VARIABLE,
    connect_locally,
    connect_worker,
)
from flambeau.worker.code_places import is_own, with_place
from flambeau.worker.context import Context
from flambeau.worker.execution_modes import MODES
from flambeau.worker.failures import load_failed
from flambeau.worker.handler_mistakes import explain_exit, explain_thread
from flambeau.worker.loader import Handle, LoadedHandler, in_envelope
from flambeau.worker.loop import BatchRunner, WorkerLoop
from flambeau.worker.model import LoadedModel, load_model
from flambeau.worker.outbox import Channel, FollowerChannel, Outbox
from flambeau.worker.request_scope import in_request_scope, log_fields

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
OBJECTS_PER_COLLECTION = 100_000  # while a model is loaded; Python's default is 700


interrupted = threading.Event()  # SIGINT has arrived


def interrupt(number: int, frame: FrameType | None) -> None:
    """Do what Python does at SIGINT, and note it: a handler may raise KeyboardInterrupt itself."""
    interrupted.set()
    signal.default_int_handler(number, frame)


def main(arguments: list[str]) -> int:
    """Run a worker; the exit status is 0 when the server stopped it."""
    gc.disable()  # until the handler is imported: torch has 160,000 objects, and none is garbage
    if PIN_VARIABLE not in os.environ:  # a placed worker lives as long as its channel, whatever becomes of its agent
        die_with_parent()
    signal.signal(signal.SIGINT, interrupt)
    faulthandler.enable(all_threads=False)
    stack_dumps.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Bare messages: the server adds the time and the name of the worker.
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    for target in logging.getLogger().handlers:
        target.setFormatter(PlainFormatter())
    threading.excepthook = tell_of_thread
    channel = connect(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    os.register_at_fork(after_in_child=lambda: channel.leave(partial(end_copy, forking_line())))
    fd = channel.socket.fileno()
    threading.Thread(target=exit_with_server, args=(fd,), daemon=True, name="exit-with-server").start()
    return serve(channel)


def connect(options: dict[str, str]) -> WorkerChannel:
    if "--fd" in options:
        return WorkerChannel(socket.socket(fileno=int(options["--fd"])), MAX_FRAME_BYTES)
    if (pin := os.environ.pop(PIN_VARIABLE, "")) and (token := os.environ.pop(TOKEN_VARIABLE, "")):
        heartbeat_s = float(os.environ.pop(HEARTBEAT_VARIABLE, HEARTBEAT_S))
        local = os.environ.pop(LOCAL_VARIABLE, "")
        if local and (channel := connect_locally(local, token)) is not None:
            return channel
        return connect_worker(options["--connect"], pin, token, heartbeat_s)
    host, _, port = options["--connect"].rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(os.environ.pop(TOKEN_VARIABLE).encode())
    return WorkerChannel(sock, MAX_FRAME_BYTES)


def die_with_parent() -> None:
    """Let the kernel kill this process when the server dies, even while it is stopped or a call keeps the GIL.

    If the server is dead by now, `exit_with_server` finds its socket closed. Systems other than Linux have no such
    signal; there the server's reaper process kills the worker.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an error leaves the reaper


def exit_with_server(fd: int) -> None:
    """Exit when the server is gone, even in the middle of a call: no client waits for the reply."""
    stack_dumps.receive_here()  # this thread runs no code of a handler
    poller = select.poll()
    poller.register(fd, getattr(select, "POLLRDHUP", 0))
    poller.poll()
    if os.getpgrp() == os.getpid():  # with every process the handler has started
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


class PlainFormatter(logging.Formatter):
    """The bare message of a handler's record. Those of this package that are warnings say so."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        is_ours = record.levelno >= logging.WARNING and record.name.startswith("flambeau.")
        return f"{record.levelname}: {text}" if is_ours else text


def tell_of_thread(args: threading.ExceptHookArgs) -> None:
    """Log the exception that ended a thread of the handler: its request is answered without it."""
    threading.__excepthook__(args)
    if args.exc_value is not None and (sentence := explain_thread(args.exc_value)):
        logger.warning("%s", sentence)


def forking_line() -> str:
    """The line of the author's code that forks, as ` (handler.py:12)`; empty if a library does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})" if frame is not None else ""


def end_copy(place: str) -> NoReturn:
    """End a copy of the worker that a handler has forked and that came back from the handler."""
    print(
        f"the handler called os.fork(){place}, and the child went on as a second worker. It ends here: only the worker "
        "answers requests. End the child with os._exit(0), or use subprocess or multiprocessing",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def serve(channel: Channel) -> int:
    """Load the model that the server names and run its jobs until the server stops the worker; the exit status."""
    load = channel.receive()
    if not isinstance(load, Load):
        return 1
    if load.rank > 0:
        channel = FollowerChannel(channel)
    if load.json_logs:
        for target in logging.getLogger().handlers:
            target.setFormatter(WorkerFormatter(log_fields))
    with closing(asyncio.new_event_loop()) as event_loop:
        asyncio.set_event_loop(event_loop)  # a handler may use it in `initialize`, and finds the same one later
        try:
            with rare_collections():
                model = load_model(load, event_loop)
        except (Exception, SystemExit) as error:
            channel.send([load_failed(error, folder=load.folder, may_change=load.watch)])
            return 1
        if load.json_logs or load.traces:
            model = in_request_scope(model, json_logs=load.json_logs, traces=load.traces)
        outbox = Outbox(channel, load.max_response_bytes, may_split=may_split(load))
        if watches_stages(load, model):
            outbox.clock.watch(model.handler.handler)
        outbox.pauses.start()
        mode = MODES[model.mode](model, new_runner(load, model, outbox), outbox)
        samples = model.context.take_samples()  # those of `initialize`
        channel.send([Samples(samples), mode.ready()] if samples else [mode.ready()])
        try:
            mode.serve(WorkerLoop(channel, mode))
        except SystemExit as error:  # stderr: the last lines of it are the cause that the server reports
            print(f"{explain_exit(error)}. It ends the worker: raise an exception instead", file=sys.stderr)
            raise
        except KeyboardInterrupt as error:
            if interrupted.is_set():  # by a signal
                raise
            print(f"the handler raised {with_place(error)}. It ends the worker: raise another one", file=sys.stderr)
            return 1
    return 0


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for reference cycles rarely: imports create hundreds of thousands of objects that all stay."""
    before = gc.get_threshold()
    ours = (OBJECTS_PER_COLLECTION, *before[1:])
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:  # else the handler has set its own
            gc.set_threshold(*before)


def new_runner(load: Load, model: LoadedModel, outbox: Outbox) -> BatchRunner:
    return BatchRunner(
        model.handler.handle,
        model.reader,
        model.context,
        outbox,
        wrap=partial(wrap, model.handler, Path(load.folder)),
        new_context=Context.isolated if load.schedule == "async" else copy.copy,
    )


def wrap(handler: LoadedHandler, folder: Path, envelope: str) -> Handle:
    """The handler's entry point in the envelope that a request asks for."""
    return in_envelope(handler, envelope, folder).handle


def watches_stages(load: Load, model: LoadedModel) -> bool:
    """Whether the stages of a handler are timed: not where calls overlap, nor where its methods may be replaced."""
    return model.mode in ("batches", "pipeline") and not load.watch


def may_split(load: Load) -> bool:
    """Whether the requests of a failed batch may run again, one by one.

    They may not where the handler keeps state between requests, nor where all ranks must make the same calls.
    """
    return load.schedule in ("batches", "async") and not load.keeps_step
