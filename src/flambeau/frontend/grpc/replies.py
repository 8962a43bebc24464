"""Replies: what becomes of a job, for the call that waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

from flambeau.errors import FlambeauError, JobFailed
from flambeau.frontend.http.problems import status_and_type
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.wire.messages import Part

logger = logging.getLogger(__name__)

UNREAD_BYTES = 64 << 20  # a client that lets this much pile up has stopped reading
FAILED_FROM = 400  # a status that the handler set, from which on its reply is an error


class Reply:
    """Takes a job's parts, and counts how it ended."""

    def __init__(self, model: Model) -> None:
        self.job: Job | None = None
        self.headers: list[tuple[str, str]] = []  # that the handler set
        self.model = model
        self._is_counted = False
        self._size_bytes = 0

    def on_parts(self, parts: list[Part]) -> None:
        """Take parts."""
        if not self._is_counted:
            self._count(parts[0].status)
            self.headers = parts[0].headers or []
            if parts[0].status >= FAILED_FROM:
                self._fail(JobFailed(parts[0].body.decode("utf-8", "replace"), status=parts[0].status))
                return
        self._take(parts)

    def on_error(self, error: FlambeauError) -> None:
        """Take an error."""
        if isinstance(error, JobFailed) and error.cause:
            request_id = self.job.request_id if self.job else ""
            logger.warning("request %s to %s: %s\n%s", request_id, self.model, error, error.cause.rstrip())
        if not self._is_counted:
            self._count(status_and_type(error)[0])
        self.end(error)

    def cancel(self) -> None:
        """Nobody waits any more; without effect when the job is over."""
        if self.job is not None:
            self.job.cancel()

    def _count(self, status: int) -> None:
        self._is_counted = True
        self.model.answers[status] += 1

    def _fail(self, error: JobFailed) -> None:
        """End with an error of our own; what else the worker makes of the job is not wanted."""
        self.cancel()
        self.end(error)

    def _take(self, parts: list[Part]) -> None:
        raise NotImplementedError

    def end(self, error: FlambeauError) -> None:
        """Nothing follows."""
        raise NotImplementedError


class WholeReply(Reply):
    """The whole reply; the parts of a handler that streams are put together."""

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
        """The reply is this error."""
        if not self.done.done():
            self.done.set_exception(error)


class StreamedReply(Reply):
    """The parts as they come; what a slow reader leaves unread is limited."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._unread: deque[bytes] = deque()
        self._num_parts = 0
        self._error: FlambeauError | None = None
        self._is_over = False
        self._arrived = asyncio.Event()

    def _take(self, parts: list[Part]) -> None:
        bodies = [part.body for part in parts]
        self._num_parts += len(bodies)
        if parts[-1].last and not bodies[-1] and self._num_parts > 1:  # the end of a generator: nothing more to say
            bodies.pop()
        self._unread.extend(bodies)
        self._size_bytes += sum(map(len, bodies))
        if self._size_bytes > UNREAD_BYTES:
            self._fail(JobFailed("The client stopped reading; its call is ended.", status=429))
            return
        self._is_over = self._is_over or parts[-1].last
        self._arrived.set()

    def end(self, error: FlambeauError) -> None:
        """The stream breaks off with this error."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._arrived.set()

    async def bodies(self) -> AsyncIterator[bytes]:
        """The parts, each as soon as it is there."""
        while True:
            while self._unread:
                body = self._unread.popleft()
                self._size_bytes -= len(body)
                yield body
            if self._is_over:
                break
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
