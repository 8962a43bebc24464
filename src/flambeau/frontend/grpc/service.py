"""GrpcService: what all RPCs share: the key, size and time limits, errors as a status, the access log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc
from grpc import StatusCode

from flambeau.config.server import ErrorStyle
from flambeau.errors import DeadlinePassed, FlambeauError, JobFailed, ReplyNotRead
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc.messages import MalformedMessage, parse
from flambeau.frontend.grpc.status import Statuses, details_of, of_management
from flambeau.frontend.http.errors import MATCHED
from flambeau.frontend.key_file import Kind
from flambeau.frontend.timing_header import EXPLAIN_HEADER, explanation, server_timing
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.tenants import Tenant
from flambeau.serving.traces import RequestTrace, Tracing
from flambeau.serving.traffic_split import VERSION_HEADER
from flambeau.serving.workers.host_resources import return_free_memory
from flambeau.wire.messages import header
from flambeau.wire.trace_context import TRACEPARENT, read_traceparent

logger = logging.getLogger(__name__)

RETURNED_S = 1.0  # after which the memory of calls that were cut is returned to the system

Context = Any  # grpc.aio.ServicerContext, whose type lacks some methods
Message = Any  # of protobuf

# Statuses that are errors of the server, as OpenTelemetry's conventions list them.
FAULTS = (
    StatusCode.UNKNOWN,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.UNIMPLEMENTED,
    StatusCode.INTERNAL,
    StatusCode.UNAVAILABLE,
    StatusCode.DATA_LOSS,
)

One = Callable[[Message], Awaitable[Message]]
Many = Callable[[Message], AsyncIterator[Message]]
Both = Callable[[AsyncIterator[Message]], AsyncIterator[Message]]
# Peer, path of the method, number of the status, duration in seconds, request id, model, trace id and chosen version.
Ended = Callable[[str, str, int, float, str, str, str, str], None]
TRACED = ("Predictions", "StreamPredictions", "StreamPredictions2", "ModelInfer", "ModelStreamInfer")


class CallRecord:
    """What is known of a call for the access log and its trace: of several requests, the last one."""

    __slots__ = ("model", "model_version", "request_id", "trace")

    def __init__(self) -> None:
        self.request_id = self.model = self.model_version = ""
        self.trace: RequestTrace | None = None

    def add(self, job: Job, model: Model) -> None:
        """A job of the call is about to be added to its model."""
        self.request_id, self.model = job.request_id, model.name
        if self.trace is not None:
            self.trace.add(job, model.name, model.version)


current_record: ContextVar[CallRecord | None] = ContextVar("current_record", default=None)


class CallTimes:
    """Which version answered a call and where the time of its prediction went, for the trailing metadata."""

    __slots__ = ("_explains", "_is_one", "_metadata", "headers")

    def __init__(self, headers: list[tuple[str, str]], *, is_one: bool) -> None:
        self._is_one = is_one  # prediction; of several, no times are sent
        self.headers = headers  # the metadata of the call, without binary values
        self._explains = (header(headers, EXPLAIN_HEADER) or "").lower() == "true"
        self._metadata: dict[str, str] = {}

    def note_version(self, version: str) -> None:
        """Take the version that was chosen for the call; metadata is ASCII."""
        self._metadata[VERSION_HEADER] = version.encode("ascii", "replace").decode()

    def note(self, job: Job, status: int) -> None:
        """Take the times of a job that is over."""
        if job.times is not None and self._is_one:
            self._metadata["server-timing"] = server_timing(job.times)
            if self._explains and (text := explanation(job, status)):
                self._metadata[EXPLAIN_HEADER] = text.decode()

    def send(self, context: Context) -> None:
        """Set the trailing metadata, if anything is known and the client is there."""
        if self._metadata and not context.done():
            context.set_trailing_metadata(tuple(self._metadata.items()))


current_tenant: ContextVar[Tenant | None] = ContextVar("current_tenant", default=None)
current_call: ContextVar[CallTimes | None] = ContextVar("current_call", default=None)


class GrpcService:
    """One gRPC service. Its methods take and return messages, and raise errors."""

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int,
        read_timeout_s: float,
        keys: Keys | None = None,
        kind: Kind = "inference",
        statuses: Statuses = of_management,
        write_timeout_s: float | None = None,
        style: ErrorStyle = MATCHED,
    ) -> None:
        self.name = name
        self._style = style
        self._max_bytes = max_bytes  # of a received message
        self._read_timeout_s = read_timeout_s  # for the first message of a call
        self._write_timeout_s = write_timeout_s  # for a client to read a message of a stream; None: no limit
        self._keys = keys  # None: calls need no key
        self._kind: Kind = kind
        self._statuses = statuses
        self.ended: Ended | None = None
        self.tracing: Tracing | None = None
        self._will_return = False
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return self._handlers

    # ---- the three kinds of calls ----
    # All of them are streams to grpc: otherwise it reads the message before the key is checked, without a time limit.
    # It sees only bytes, so that invalid messages get an error of this server.

    def one(self, method: str, kind: type[Message], work: One) -> None:
        """One message in, one out."""

        async def call(_: object, context: Context) -> bytes:
            note, code = self._begin(method, context), StatusCode.CANCELLED
            times = watch_call(context)
            try:
                await self._open(method, context)
                reply: bytes = (await work(await self._read_one(kind, context))).SerializeToString()
                code = StatusCode.OK
                return reply
            except Exception as error:
                code = self._fail(method, context, error)
                return b""
            finally:
                times.send(context)
                note(code)

        self._handlers[method] = grpc.stream_unary_rpc_method_handler(call)

    def many(self, method: str, kind: type[Message], work: Many) -> None:
        """One message in, a stream out."""

        async def replies(context: Context) -> AsyncIterator[Message]:
            async with aclosing(work(await self._read_one(kind, context))) as made:  # type: ignore[type-var]
                async for reply in made:
                    yield reply

        async def call(_: object, context: Context) -> None:
            times = watch_call(context)
            await self._stream(method, context, lambda: replies(context), times)

        self._handlers[method] = grpc.stream_stream_rpc_method_handler(call)

    def both(self, method: str, kind: type[Message], work: Both, *, idle_s: float | None = None) -> None:
        """A stream in, a stream out; it ends if nothing is received for `idle_s`."""

        async def call(_: object, context: Context) -> None:
            times = watch_call(context, is_one=False)
            await self._stream(method, context, lambda: work(self._read_all(kind, context, idle_s)), times)

        self._handlers[method] = grpc.stream_stream_rpc_method_handler(call)

    async def _read_one(self, kind: type[Message], context: Context) -> Message:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                raw = await context.read()
        except TimeoutError:
            text = f"The request did not arrive within {self._read_timeout_s:g} s, the server's request_read_timeout."
            raise DeadlinePassed(text) from None
        if raw is grpc.aio.EOF:
            raise MalformedMessage("The call holds no message.")
        return self._parse(kind, raw)

    async def _read_all(self, kind: type[Message], context: Context, idle_s: float | None) -> AsyncIterator[Message]:
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    raw = await context.read()
            except TimeoutError:
                return
            if raw is grpc.aio.EOF:
                return
            yield self._parse(kind, raw)

    async def _stream(
        self,
        method: str,
        context: Context,
        work: Callable[[], AsyncIterator[Message]],
        times: CallTimes,
    ) -> None:
        note, code = self._begin(method, context), StatusCode.CANCELLED
        try:
            await self._open(method, context)
            async with aclosing(work()) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    await self._write(context, reply.SerializeToString())
            code = StatusCode.OK
        except Exception as error:
            code = self._fail(method, context, error)
        finally:
            times.send(context)
            note(code)

    async def _write(self, context: Context, message: bytes) -> None:
        """Send a message; returns when there is room for the next, which is up to the client."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(message)
        except TimeoutError:
            text = "the client %s did not read a message for %g s (response_read_timeout); its call is ended"
            logger.warning(text, context.peer(), self._write_timeout_s)
            raise ReplyNotRead from None

    # ---- before and after ----

    def _return_memory(self, _: Context) -> None:
        """Return memory to the system a moment after a call, once for many calls."""
        if not self._will_return:
            self._will_return = True
            asyncio.get_running_loop().call_later(RETURNED_S, self._returned)

    def _returned(self) -> None:
        self._will_return = False
        return_free_memory()

    def _begin(self, method: str, context: Context) -> Callable[[StatusCode], None]:
        """The function to call with the status when the call ends."""
        ended = self.ended
        if ended is None and self.tracing is None:
            return ignore
        began, peer, path = time.monotonic(), context.peer(), f"{self.name}/{method}"  # unknown after a disconnection
        call = CallRecord()
        current_record.set(call)  # a call is a task of its own

        def note(code: StatusCode) -> None:
            if call.trace is not None:
                attributes = {"rpc.grpc.status_code": code.value[0], "network.peer.address": peer}
                call.trace.end(attributes, code.name if code in FAULTS else "")
            if ended is not None:
                trace_id = call.trace.trace_id if call.trace is not None else trace_id_of(context)
                names = (call.request_id, call.model, trace_id, call.model_version)
                ended(peer, path, code.value[0], time.monotonic() - began, *names)

        return note

    async def _open(self, method: str, context: Context) -> None:
        """Check the key, and begin the trace of a call that runs a model."""
        metadata = context.invocation_metadata() or ()
        if self._keys is not None:
            current_tenant.set(self._keys.check(self._kind, header(metadata, "authorization")))
        call = current_record.get() if self.tracing is not None and method in TRACED else None
        if self.tracing is not None and call is not None:
            trace = call.trace = self.tracing.begin(text_of(metadata), time.monotonic())
            if trace is not None:
                attributes = {"rpc.system": "grpc", "rpc.service": self.name, "rpc.method": method}
                trace.describe(f"{self.name}/{method}", attributes)
                await context.send_initial_metadata(((TRACEPARENT, trace.traceparent),))

    def _parse(self, kind: type[Message], raw: bytes) -> Message:
        if len(raw) > self._max_bytes:
            text = f"The request has {len(raw)} bytes; the server's max_request_size allows {self._max_bytes}."
            raise JobFailed(text, status=413)
        return parse(kind, raw)

    def _fail(self, method: str, context: Context, error: Exception) -> StatusCode:
        """Set the status of a failed call; returns its code."""
        if context.done() or isinstance(error, grpc.aio.InternalError):  # grpc raises it if the client has disconnected
            return StatusCode.CANCELLED
        if isinstance(error, FlambeauError):
            code, name = self._statuses(error)
            details = details_of(error, name, self._style)
            if isinstance(error, ReplyNotRead):  # grpc holds the last message until the client is gone
                context.add_done_callback(self._return_memory)
        else:
            logger.error("%s/%s failed", self.name, method, exc_info=error)
            code, details = StatusCode.INTERNAL, "Internal server error."
        context.set_code(code)
        context.set_details(details)
        return code


def text_of(metadata: Any) -> list[tuple[str, str]]:
    """The metadata without binary values."""
    return [(key, value) for key, value in metadata if isinstance(value, str)]


def trace_id_of(context: Context) -> str:
    """The trace that the client names; empty if there is none."""
    found = read_traceparent(header(text_of(context.invocation_metadata() or ()), TRACEPARENT))
    return found.trace_id if found else ""


def watch_call(context: Context, *, is_one: bool = True) -> CallTimes:
    """Let the predictions that follow in this task note their version, and one its times."""
    times = CallTimes(text_of(context.invocation_metadata() or ()), is_one=is_one)
    current_call.set(times)
    return times


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether grpc logs more than that a client has disconnected, which it reports with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def ignore(code: StatusCode) -> None:
    """For calls without an access log."""
