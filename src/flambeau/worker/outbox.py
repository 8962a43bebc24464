"""Outbox: which jobs of a worker are open or cancelled, and what is sent of them."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from flambeau.wire.messages import (
    Cancel,
    EngineReport,
    Failed,
    Flow,
    Part,
    Ready,
    Request,
    Samples,
    ToServer,
    ToWorker,
    Work,
    cancelled,
)
from flambeau.worker.context import Context
from flambeau.worker.failures import to_failed
from flambeau.worker.results import BadResult, check_result, check_size, to_body, to_part, to_parts
from flambeau.worker.stage_clock import PauseLog, StageClock

POLL_INTERVAL_S = 0.001
PAUSE_S = 0.02  # between two looks at a paused reply

# When the inputs of a batch were read, when its handler was called, and how long `preprocess` took if it ran before.
BatchStart = tuple[float, float, float | None]


class Channel(Protocol):
    """The worker's end of the connection to the server."""

    @property
    def socket(self) -> socket.socket:
        """The socket, to wait for messages on an event loop."""

    def send(self, messages: Sequence[ToServer]) -> None:
        """Send these messages as one frame."""

    def receive(self) -> ToWorker | None:
        """The next message; None when the server is gone."""

    def poll(self) -> deque[ToWorker]:
        """Everything that has arrived and was not received yet, without waiting."""


class FollowerChannel:
    """The channel of a rank other than 0: sends when it is ready, fails or is done. Rank 0 sends the replies."""

    def __init__(self, channel: Channel) -> None:
        self.socket = channel.socket
        self.receive = channel.receive
        self.poll = channel.poll
        self._send = channel.send

    def send(self, messages: Sequence[ToServer]) -> None:
        kept: list[ToServer] = []
        for message in messages:
            if isinstance(message, Part):
                kept += [Part(message.job_id, b"")] if message.last else []
            elif isinstance(message, Ready | Failed):
                kept.append(message)
        if kept:
            self._send(kept)


class Outbox:
    """Tracks open and cancelled jobs and sends their replies. A context sends through it as well."""

    def __init__(self, channel: Channel, max_response_bytes: int, *, may_split: bool = True) -> None:
        self._channel = channel
        self._may_split = may_split
        self._max_bytes = max_response_bytes
        self._cancelled: set[int] = set()
        self._paused: set[int] = set()  # open jobs whose clients do not read
        self._open: set[int] = set()  # jobs without their last part
        self._next_poll = self._next_early_poll = 0.0
        self.clock = StageClock()
        self.pauses = PauseLog()
        self.reader = threading.current_thread()  # the only thread that polls the channel
        self.has_own_reader = False  # a thread that does nothing but receive
        self.on_arrived: Callable[[], object] | None = None  # set where many batches run at a time

    # ---- open jobs ----

    def open(self, jobs: Iterable[Request]) -> None:
        self._open.update([request.job_id for request in jobs])

    def reject_cancelled(self, request: Request) -> bool:
        """Answer a job that was cancelled before it began; False if it was not."""
        if request.job_id not in self._cancelled:
            return False
        self._close_cancelled(request.job_id)
        return True

    def abandon(self, job_id: int) -> bool:
        """Answer an open job as cancelled; False if it is over already."""
        if job_id not in self._open:
            return False
        self._close_cancelled(job_id)
        return True

    def can_split(self, context: Context) -> bool:
        """Whether the requests of a failed batch can run one by one, so that one bad request fails alone."""
        requests = context.requests
        return (
            self._may_split
            and len(requests) > 1
            and not context.has_sent
            and all(r.job_id in self._open for r in requests)
        )

    def _close_cancelled(self, job_id: int) -> None:
        self._close(job_id)
        self._channel.send([cancelled(job_id)])

    def _close(self, job_id: int) -> None:
        self._open.discard(job_id)
        self._cancelled.discard(job_id)
        self._paused.discard(job_id)

    # ---- replies ----

    def send(self, context: Context, i: int, value: Any, *, last: bool) -> None:
        """Send a part of the reply to request `i` of the batch."""
        part = self._part(context, i, value, last=last)
        self._channel.send([part])
        if last:
            self._close(part.job_id)

    def send_values(
        self, context: Context, values: Sequence[Any], indices: Sequence[int] | None = None, *, verb: str = "sent"
    ) -> None:
        """Send one chunk to each request of the batch, or to those at `indices`; wait while no client reads."""
        values = check_result(values, len(context.requests) if indices is None else len(indices), verb)
        parts = to_parts(context, values, self._max_bytes, last=False, indices=indices)
        context.has_sent = True
        self._channel.send(parts)
        os.sched_yield()  # the kernel tends to wake the server on this core: let it send the chunk now
        self._poll_sometimes()
        if self._paused:
            self.wait_for_clients(context.requests)

    def send_step(self, context: Context, values: Sequence[Any], lasts: Sequence[bool]) -> None:
        """Send one part to each request of the batch; `lasts` tells which are the last ones."""
        parts = [self._part(context, i, value, last=lasts[i]) for i, value in enumerate(values)]
        context.has_sent = True
        self._channel.send(parts)
        for part in parts:
            if part.last:
                self._close(part.job_id)

    def finish(self, context: Context, values: Sequence[Any], start: BatchStart | None = None) -> None:
        """Send the last part to each request of the batch, after the samples: a client finds its request counted."""
        returned = time.monotonic()
        parts = to_parts(context, values, self._max_bytes, last=True)
        if start is not None:
            parts[0] = replace(parts[0], work=self._work(start, returned))
        samples = context.take_samples()
        self._channel.send([Samples(samples), *parts] if samples else parts)
        for part in parts:
            self._close(part.job_id)

    def _work(self, start: BatchStart, returned: float) -> Work:
        began, called, preprocess_s = start
        return Work(
            began,
            time.monotonic(),
            called - began - (preprocess_s or 0.0),
            returned - called + (preprocess_s or 0.0),
            self.clock.take(preprocess_s),
            None,
            self.pauses.since(began) if self.pauses.pauses else None,
        )

    def send_messages(self, context: Context, messages: Sequence[Part | Failed]) -> None:
        """Send the results of one step after its samples, in frames no larger than the server accepts."""
        frame: list[ToServer] = []
        samples = context.take_samples()
        if samples:
            frame.append(Samples(samples))
        size_bytes = 0
        for message in messages:
            if isinstance(message, Part) and len(message.body) > self._max_bytes:
                message = self._too_large(message)
            if isinstance(message, Part):
                size_bytes += len(message.body)
                if size_bytes > self._max_bytes:
                    self._channel.send(frame)
                    frame, size_bytes = [], len(message.body)
                if message.last:
                    self._close(message.job_id)
            else:
                for job_id in message.job_ids:
                    self._close(job_id)
            frame.append(message)
        if frame:
            self._channel.send(frame)

    def send_report(self, report: EngineReport) -> None:
        self._channel.send([report])

    def send_heartbeat(self) -> None:
        """Show the server that the worker is alive."""
        self._channel.send([Samples([])])

    def send_samples(self, context: Context) -> None:
        if samples := context.take_samples():
            self._channel.send([Samples(samples)])

    def fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """Fail those of the requests that are still open."""
        open_ids = [request.job_id for request in requests if request.job_id in self._open]
        if open_ids:
            self._channel.send([to_failed(open_ids, error)])
        for job_id in open_ids:
            self._close(job_id)

    def _too_large(self, part: Part) -> Part | Failed:
        try:
            check_size(part.body, self._max_bytes)
        except BadResult as error:
            return to_failed([part.job_id], error)
        return part

    def _part(self, context: Context, i: int, value: Any, *, last: bool) -> Part:
        processors = context.touched_processors
        body = to_body(value)
        check_size(body, self._max_bytes)
        return to_part(context.requests[i].job_id, body, processors[i] if processors else None, last=last)

    # ---- cancellation ----

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Mark open jobs as cancelled; others are over and need no mark."""
        self._cancelled.update(self._open.intersection(job_ids))

    def forget_cancelled(self, job_ids: Iterable[int]) -> None:
        """Drop marks: in a channel that is read in order, the jobs before a Cancel are over."""
        self._cancelled.difference_update(job_ids)

    def is_cancelled(self, job_id: int) -> bool:
        """Whether the client of a job is gone; includes cancellations that have just arrived."""
        self._poll_sometimes()
        return job_id in self._cancelled

    def all_cancelled(self, context: Context) -> bool:
        """Whether the clients of all requests of the batch are gone."""
        self._poll_sometimes()
        return bool(self._cancelled) and all(request.job_id in self._cancelled for request in context.requests)

    def poll_before_batch(self) -> None:
        """Look for cancellations before a batch begins; of many short ones, a look costs as much as a batch."""
        now = time.monotonic()
        if now >= self._next_early_poll:
            self._next_early_poll = now + POLL_INTERVAL_S
            self.poll_cancellations()

    def poll_cancellations(self) -> None:
        """Mark the jobs of Cancel messages that wait in the channel; the messages stay there until their turn."""
        if threading.current_thread() is not self.reader:
            return
        arrived = self._channel.poll()
        for message in arrived:
            if type(message) is Cancel:
                self._cancelled.update(self._open.intersection(message.job_ids) if self.on_arrived else message.job_ids)
            elif type(message) is Flow:
                self.set_flow(message)
        if arrived and self.on_arrived:
            self.on_arrived()

    # ---- clients that do not read ----

    def set_flow(self, flow: Flow) -> None:
        """Pause an open job, or let it go on."""
        if flow.is_paused and flow.job_id in self._open:
            self._paused.add(flow.job_id)
        else:
            self._paused.discard(flow.job_id)

    @property
    def has_paused(self) -> bool:
        return bool(self._paused)

    def is_paused(self, job_id: int) -> bool:
        """Whether the client of a job does not read; a cancelled job is not paused."""
        return job_id in self._paused and job_id not in self._cancelled

    def all_paused(self, requests: Iterable[Request]) -> bool:
        """Whether no client of these jobs reads. One that does is not held up by the others."""
        if not self._paused:
            return False
        going = self._open - self._cancelled
        waiting = [request.job_id in self._paused for request in requests if request.job_id in going]
        return bool(waiting) and all(waiting)

    def wait_for_clients(self, requests: Sequence[Request]) -> None:
        """Return when a client of these jobs reads again or is gone. It receives cancellations meanwhile."""
        is_reader = threading.current_thread() is self.reader
        if self.on_arrived is not None or not (is_reader or self.has_own_reader):
            return  # this thread must not wait: other batches run in it, or nobody would receive the message
        while self.all_paused(requests):
            if not is_reader:
                time.sleep(PAUSE_S)
            elif is_closed(self._channel.socket, PAUSE_S):
                return  # the next attempt to send fails
            else:
                self.poll_cancellations()

    def _poll_sometimes(self) -> None:
        # Handlers ask in tight loops, and each poll is a system call.
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_INTERVAL_S
            self.poll_cancellations()


def is_closed(sock: socket.socket, timeout_s: float) -> bool:
    """Wait until something has arrived; return whether it is the end of the connection."""
    if not select.select([sock], [], [], timeout_s)[0]:
        return False
    return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
