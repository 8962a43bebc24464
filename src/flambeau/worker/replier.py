"""Replier: which jobs are open and which nobody waits for any more; sends what becomes of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from flambeau.metrics.samples import Sample
from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Cancel, Failed, Part, Request, Samples, ToServer, cancelled
from flambeau.worker.context import Context
from flambeau.worker.failures import to_failed
from flambeau.worker.replies import BadResult, check_result, check_size, to_body, to_part, to_parts

LOOK_EVERY_S = 0.001


class Replier:
    """The worker's side of its open jobs; it is also what a context reaches the server through."""

    def __init__(self, channel: WorkerChannel, max_response_bytes: int, *, may_split: bool = True) -> None:
        self._channel = channel
        self._may_split = may_split
        self._max_bytes = max_response_bytes
        self._cancelled: set[int] = set()
        self._open: set[int] = set()  # jobs that are not answered yet
        self._next_look = 0.0
        self.reader = threading.current_thread()  # the one that reads the channel, and notes cancellations
        self.wake: Callable[[], object] | None = None  # only where many batches run at a time

    # ---- which jobs there are ----

    def open(self, jobs: Iterable[Request]) -> None:
        """These jobs have been begun."""
        self._open.update([request.job_id for request in jobs])

    def refuse_cancelled(self, request: Request) -> bool:
        """Answer a job that nobody waits for any more; False if somebody does."""
        if request.job_id not in self._cancelled:
            return False
        self._forget(request.job_id)
        self._channel.send([cancelled(request.job_id)])
        return True

    def drop(self, job_id: int) -> bool:
        """Answer an open job that nobody waits for any more, at once; False if it is over already."""
        if job_id not in self._open:
            return False
        self._forget(job_id)
        self._channel.send([cancelled(job_id)])
        return True

    def may_try_each(self, context: Context) -> bool:
        """Whether the requests of a failed batch can be run one by one, so that one bad request fails alone."""
        requests = context.requests
        return (
            self._may_split
            and len(requests) > 1
            and not context.has_sent
            and all(r.job_id in self._open for r in requests)
        )

    def _forget(self, job_id: int) -> None:
        self._open.discard(job_id)
        self._cancelled.discard(job_id)

    # ---- what becomes of them ----

    def send_values(self, context: Context, values: Sequence[Any], indices: Sequence[int] | None = None) -> None:
        """Send one chunk to each request of the batch, or to those of them that are named, now."""
        values = check_result(values, len(context.requests) if indices is None else len(indices))
        parts = to_parts(context, values, self._max_bytes, last=False, indices=indices)
        context.has_sent = True
        self._channel.send(parts)
        os.sched_yield()  # the kernel likes to wake the server on this very core: let it send the chunk now

    def send_step(self, context: Context, values: Sequence[Any], lasts: Sequence[bool]) -> None:
        """Send one part to each request of the batch, the last one to those it ends."""
        parts = [self._part(context, i, value, last=lasts[i]) for i, value in enumerate(values)]
        context.has_sent = True
        self._channel.send(parts)
        for part in parts:
            if part.last:
                self._forget(part.job_id)

    def finish(self, context: Context, values: Sequence[Any], handler_s: float = 0.0) -> None:
        """Send the last part of each reply of the batch, with what was measured: who has an answer finds it counted."""
        parts = to_parts(context, values, self._max_bytes, last=True)
        if handler_s:
            parts[-1] = replace(parts[-1], handler_s=handler_s)
        samples = samples_of(context)
        self._channel.send([Samples(samples), *parts] if samples else parts)
        for part in parts:
            self._forget(part.job_id)

    def send_made(self, context: Context, made: Sequence[Part | Failed]) -> None:
        """Send what one step has made, as few frames as the server takes, behind what was measured meanwhile."""
        frame: list[ToServer] = []
        samples = samples_of(context)
        if samples:
            frame.append(Samples(samples))
        size_bytes = 0
        for message in made:
            message = self._within_limit(message)
            if isinstance(message, Part):
                size_bytes += len(message.body)
                if size_bytes > self._max_bytes:
                    self._channel.send(frame)
                    frame, size_bytes = [], len(message.body)
                if message.last:
                    self._forget(message.job_id)
            else:
                for job_id in message.job_ids:
                    self._forget(job_id)
            frame.append(message)
        if frame:
            self._channel.send(frame)

    def _within_limit(self, message: Part | Failed) -> Part | Failed:
        if isinstance(message, Part) and len(message.body) > self._max_bytes:
            try:
                check_size(message.body, self._max_bytes)
            except BadResult as error:
                return to_failed([message.job_id], error)
        return message

    def send_one(self, context: Context, i: int, value: Any, *, last: bool) -> None:
        """Send a part of one reply of the batch."""
        part = self._part(context, i, value, last=last)
        self._channel.send([part])
        if last:
            self._forget(part.job_id)

    def _part(self, context: Context, i: int, value: Any, *, last: bool) -> Part:
        processors = context.touched_processors
        body = to_body(value)
        check_size(body, self._max_bytes)
        return to_part(context.requests[i].job_id, body, processors[i] if processors else None, last=last)

    def fail(self, requests: Sequence[Request], error: BaseException) -> None:
        """Fail those of the requests that are not answered yet."""
        open_ids = [request.job_id for request in requests if request.job_id in self._open]
        if open_ids:
            self._channel.send([to_failed(open_ids, error)])
        for job_id in open_ids:
            self._forget(job_id)

    def send_samples(self, context: Context) -> None:
        """Send what the handler has measured."""
        if samples := samples_of(context):
            self._channel.send([Samples(samples)])

    # ---- cancellation ----

    def note_cancelled(self, job_ids: Iterable[int]) -> None:
        """Nobody waits for these any more; those that are over are not kept."""
        self._cancelled.update(self._open.intersection(job_ids))

    def forget_cancelled(self, job_ids: Iterable[int]) -> None:
        """A cancellation has its turn in a channel that is read in order: the jobs before it are over."""
        self._cancelled.difference_update(job_ids)

    def is_cancelled(self, job_id: int) -> bool:
        """Whether nobody waits for that job any more; looks at what has just arrived."""
        self._look_sometimes()
        return job_id in self._cancelled

    def all_cancelled(self, context: Context) -> bool:
        """Whether nobody waits for any request of the batch."""
        self._look_sometimes()
        return bool(self._cancelled) and all(request.job_id in self._cancelled for request in context.requests)

    def look_for_cancels(self) -> None:
        """Take note of cancellations that wait in the channel; they stay there until their turn comes."""
        if threading.current_thread() is not self.reader:
            return
        arrived = self._channel.poll()
        for message in arrived:
            if type(message) is Cancel:
                self._cancelled.update(self._open.intersection(message.job_ids) if self.wake else message.job_ids)
        if arrived and self.wake:
            self.wake()

    def _look_sometimes(self) -> None:
        """The same for callers in a tight loop."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self.look_for_cancels()


def samples_of(context: Context) -> list[Sample]:
    """What the handler has measured since the last look."""
    take = getattr(context.metrics, "take", None)
    return take() if take is not None else []
