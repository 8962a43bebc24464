"""Jobs of gRPC calls: request → job, and the replies that calls wait for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import partial

from flambeau.errors import BadRequest, FlambeauError, JobFailed, ReplyNotRead
from flambeau.frontend.grpc.messages import MalformedMessage
from flambeau.frontend.grpc.service import CallTimes, current_call, current_record, current_tenant
from flambeau.frontend.http.errors import status_and_type
from flambeau.frontend.http.exchange import new_request_id
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.reply_budget import ReplyBudget, resume_below_bytes
from flambeau.serving.server import Server
from flambeau.serving.workers.host_resources import return_free_memory
from flambeau.wire.messages import Part

MAX_INPUTS = 1000  # the limit of a form's fields too

Headers = list[tuple[str, str]]


def find_model(server: Server, name: str, version: str) -> Model:
    """The model of a call; an empty version means the default."""
    if not name:
        raise BadRequest("Parameter model_name is required.")
    return server.registry.find(name, version or None)


def add_inputs(
    server: Server, model: Model, version: str, inputs: Mapping[str, bytes], reply: GrpcReply, headers: Headers
) -> None:
    """Submit a map of named bytes to a model; the handler gets the entries unchanged."""
    if len(inputs) > MAX_INPUTS:
        raise MalformedMessage(f"The request has {len(inputs)} inputs; {MAX_INPUTS} are allowed.")
    fields = [(name, len(value)) for name, value in inputs.items()]
    job = Job(
        reply,
        request_id=new_request_id(),
        headers=headers,
        body=to_body(server, [*inputs.values()]),
        arrived=time.monotonic(),
        fields=fields,
    )
    add(model, version, reply, job)


def add(model: Model, version: str, reply: GrpcReply, job: Job) -> None:
    """Add a job to its model, or to the version whose turn it is; if that rejects it, the reply is the error."""
    split = None if version else model.split
    if split is not None:
        times = current_call.get()
        model = reply.model = split.choose(times.headers if times is not None else ())
        version = model.version
        if times is not None:
            times.note_version(version)
        split.default.stand_in_for(model, job, partial(on_moved, reply, times))
    reply.job = job
    job.tenant = current_tenant.get()
    if (call := current_record.get()) is not None:
        call.add(job, model)
        call.model_version = model.version if split is not None else ""
    try:
        model.add(job, requested_version=version or None)
    except FlambeauError as error:
        job.body.release()
        reply.on_error(error)
        return
    if split is not None:
        split.copy(job, model)


def on_moved(reply: GrpcReply, times: CallTimes | None, model: Model) -> None:
    """Another version answers."""
    reply.model = model
    if times is not None:
        times.note_version(model.version)


def to_body(server: Server, values: list[bytes]) -> RequestBody:
    """The values, concatenated; in shared memory if they are large."""
    size = sum(map(len, values))
    if server.segments is None or size < server.config.shared_memory_from_bytes:
        return RequestBody(values[0] if len(values) == 1 else b"".join(values))
    try:
        segment = server.segments.take(size)
    except OSError:
        return RequestBody(values[0] if len(values) == 1 else b"".join(values))
    start = 0
    for value in values:
        segment.memory[start : start + len(value)] = value
        start += len(value)
    return RequestBody.shared(segment, size, server.segments.give_back)


logger = logging.getLogger(__name__)

COUNTED_BYTES = 64 << 10  # a reply with more unread data is counted; HTTP counts from there as well
MAX_UNREAD_BYTES = 64 << 20  # of a reply that cannot be paused; with more, it is ended
RETURNED_S = 1.0  # after which free memory is returned to the system
PART_BYTES = 64  # the cost of a part besides its content
FAILED_FROM = 400  # statuses of a handler that are errors


class GrpcReply:
    """Receives the parts of a job, and counts its status."""

    def __init__(self, model: Model) -> None:
        self.job: Job | None = None  # until either ends: they refer to each other
        self.headers: list[tuple[str, str]] = []  # set by the handler
        self.model = model
        self._is_counted = False
        self._size_bytes = 0
        self._times = current_call.get()

    def on_parts(self, parts: list[Part]) -> None:
        if parts[-1].last:
            self._note_times(parts[0].status)
            self.job = None
        if not self._is_counted:
            self._count(parts[0].status)
            self.headers = parts[0].headers or []
            if parts[0].status >= FAILED_FROM:
                self._fail(JobFailed(parts[0].body.decode("utf-8", "replace"), status=parts[0].status))
                return
        self._take(parts)

    def on_error(self, error: FlambeauError) -> None:
        if isinstance(error, JobFailed) and error.cause:
            request_id, fields = (self.job.request_id, self.job.log_fields) if self.job else ("", {})
            text, extra = "request %s to %s: %s\n%s", {**fields, "model": self.model.name}
            logger.warning(text, request_id, self.model, error, error.cause.rstrip(), extra=extra)
        status = status_and_type(error)[0]
        self._note_times(status)
        if self._is_counted:
            self.model.count_broken(status)
        else:
            self._count(status)
        self.job = None
        self.end(error)

    def _note_times(self, status: int) -> None:
        if self._times is not None and self.job is not None:
            self._times.note(self.job, status)

    def cancel(self) -> None:
        """Cancel the job; without effect once it has ended."""
        job, self.job = self.job, None
        if job is not None:
            job.cancel()

    def _count(self, status: int) -> None:
        self._is_counted = True
        self.model.answers[status] += 1

    def _fail(self, error: JobFailed) -> None:
        """End with an error, and cancel the rest of the job."""
        self.cancel()
        self.end(error)

    def _take(self, parts: list[Part]) -> None:
        raise NotImplementedError

    def end(self, error: FlambeauError) -> None:
        """End the reply with an error."""
        raise NotImplementedError


class UnaryReply(GrpcReply):
    """The whole reply; the parts of a streaming handler are joined."""

    def __init__(self, model: Model, max_bytes: int) -> None:
        super().__init__(model)
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._max_bytes = max_bytes
        self._bodies: list[bytes] = []

    def _take(self, parts: list[Part]) -> None:
        self._bodies += [part.body for part in parts]
        self._size_bytes += sum(len(part.body) for part in parts)
        if len(self._bodies) > 1 and self._size_bytes > self._max_bytes:
            text = f"The parts of the reply make more than max_response_size, {self._max_bytes} bytes; raise it, "
            self._fail(JobFailed(text + "or call StreamPredictions.", status=413))
        elif parts[-1].last and not self.done.done():
            self.done.set_result(b"".join(self._bodies))

    def end(self, error: FlambeauError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class StreamReply(GrpcReply):
    """The parts as they arrive; a client that does not read pauses its job."""

    def __init__(self, model: Model, budget: ReplyBudget[StreamReply]) -> None:
        super().__init__(model)
        self._budget = budget
        self._is_held = False  # counted in the budget
        self._resume_below = 0  # bytes; 0: it is not paused
        self._unread: deque[bytes] = deque()
        self._num_parts = 0
        self._error: FlambeauError | None = None
        self._is_over = False
        self._arrived = asyncio.Event()

    def _take(self, parts: list[Part]) -> None:
        bodies = [part.body for part in parts]
        self._num_parts += len(bodies)
        if parts[-1].last and not bodies[-1] and self._num_parts > 1:  # the end of a generator has no content
            bodies.pop()
        self._unread.extend(bodies)
        self._is_over = self._is_over or parts[-1].last
        self._size_bytes += sum(map(len, bodies)) + PART_BYTES * len(bodies)
        if self._size_bytes > COUNTED_BYTES:
            self._hold()
        self._arrived.set()

    def _hold(self) -> None:
        """Count what is held for the client, and pause the job if it is much."""
        budget, held, now = self._budget, self._size_bytes, time.monotonic()
        self._is_held = True
        budget.hold(self, held, now)
        if held > MAX_UNREAD_BYTES and not self._is_over:
            self.cut()
        elif held > budget.pause_above_bytes and not self._resume_below and self.job is not None:
            self._resume_below = max(1, resume_below_bytes(budget.pause_above_bytes))
            self.job.pause(held - self._resume_below)
        for greedy in budget.to_cut(now) if budget.is_exceeded else ():
            greedy.cut()

    def cut(self) -> None:
        """End the reply without what its client has not read."""
        logger.warning("a client of %s stopped reading its reply, which is cut", self.model)
        self.cancel()
        self._is_over, self._error = True, ReplyNotRead()
        self._drop()
        self._arrived.set()

    def cancel(self) -> None:
        super().cancel()
        self._drop()

    def _drop(self) -> None:
        """Hold nothing for the client any more."""
        self._unread.clear()
        self._size_bytes = 0
        self._release()

    def _release(self) -> None:
        self._is_held = False
        self._budget.release(self)
        if self._budget.take_drained():  # a moment later: grpc still holds the last message
            asyncio.get_running_loop().call_later(RETURNED_S, return_free_memory)

    def _on_read(self, body: bytes) -> None:
        self._size_bytes = held = max(0, self._size_bytes - len(body) - PART_BYTES)
        if self._resume_below and held < self._resume_below:
            self._resume_below = 0
            if self.job is not None:
                self.job.resume()
        if not self._is_held:
            return
        if held > COUNTED_BYTES:
            self._budget.hold(self, held, time.monotonic())
        else:
            self._release()

    def end(self, error: FlambeauError) -> None:
        if not self._is_over:
            self._is_over, self._error = True, error
            self._arrived.set()

    async def bodies(self) -> AsyncIterator[bytes]:
        """The parts, each as soon as it arrives."""
        while True:
            while self._unread:
                body = self._unread.popleft()
                yield body
                self._on_read(body)
            if self._is_over:
                break
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
