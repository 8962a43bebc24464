"""GrpcService: what all RPCs share: the key, size and time limits, errors as a status, the access log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc import StatusCode

from flambeau.errors import DeadlinePassed, FlambeauError, JobFailed, ReplyNotRead
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc.messages import MalformedMessage, parse
from flambeau.frontend.grpc.status import Statuses, details_of, of_management
from flambeau.frontend.key_file import Kind
from flambeau.serving.workers.host_resources import return_free_memory
from flambeau.wire.messages import header

logger = logging.getLogger(__name__)

RETURNED_S = 1.0  # after which the memory of calls that were cut is returned to the system

Context = Any  # grpc.aio.ServicerContext, whose type lacks some methods
Message = Any  # of protobuf

One = Callable[[Message], Awaitable[Message]]
Many = Callable[[Message], AsyncIterator[Message]]
Both = Callable[[AsyncIterator[Message]], AsyncIterator[Message]]
Ended = Callable[[str, str, int, float], None]  # peer, path of the method, number of the status, duration in seconds


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
    ) -> None:
        self.name = name
        self._max_bytes = max_bytes  # of a received message
        self._read_timeout_s = read_timeout_s  # for the first message of a call
        self._write_timeout_s = write_timeout_s  # for a client to read a message of a stream; None: no limit
        self._keys = keys  # None: calls need no key
        self._kind: Kind = kind
        self._statuses = statuses
        self.ended: Ended | None = None
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
            try:
                self._check(context)
                reply: bytes = (await work(await self._read_one(kind, context))).SerializeToString()
                code = StatusCode.OK
                return reply
            except Exception as error:
                code = self._fail(method, context, error)
                return b""
            finally:
                note(code)

        self._handlers[method] = grpc.stream_unary_rpc_method_handler(call)

    def many(self, method: str, kind: type[Message], work: Many) -> None:
        """One message in, a stream out."""

        async def replies(context: Context) -> AsyncIterator[Message]:
            async with aclosing(work(await self._read_one(kind, context))) as made:  # type: ignore[type-var]
                async for reply in made:
                    yield reply

        async def call(_: object, context: Context) -> None:
            await self._stream(method, context, lambda: replies(context))

        self._handlers[method] = grpc.stream_stream_rpc_method_handler(call)

    def both(self, method: str, kind: type[Message], work: Both, *, idle_s: float | None = None) -> None:
        """A stream in, a stream out; it ends if nothing is received for `idle_s`."""

        async def call(_: object, context: Context) -> None:
            await self._stream(method, context, lambda: work(self._read_all(kind, context, idle_s)))

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

    async def _stream(self, method: str, context: Context, work: Callable[[], AsyncIterator[Message]]) -> None:
        note, code = self._begin(method, context), StatusCode.CANCELLED
        try:
            self._check(context)
            async with aclosing(work()) as replies:  # type: ignore[type-var]
                async for reply in replies:
                    await self._write(context, reply.SerializeToString())
            code = StatusCode.OK
        except Exception as error:
            code = self._fail(method, context, error)
        finally:
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
        if ended is None:
            return ignore
        began, peer = time.monotonic(), context.peer()  # unknown once the client has disconnected
        return lambda code: ended(peer, f"{self.name}/{method}", code.value[0], time.monotonic() - began)

    def _check(self, context: Context) -> None:
        if self._keys is not None:
            self._keys.check(self._kind, header(context.invocation_metadata() or (), "authorization"))

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
            details = details_of(error, name)
            if isinstance(error, ReplyNotRead):  # grpc holds the last message until the client is gone
                context.add_done_callback(self._return_memory)
        else:
            logger.error("%s/%s failed", self.name, method, exc_info=error)
            code, details = StatusCode.INTERNAL, "Internal server error."
        context.set_code(code)
        context.set_details(details)
        return code


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether grpc logs more than that a client has disconnected, which it reports with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def ignore(code: StatusCode) -> None:
    """For calls without an access log."""
