"""AgentLink: the server's end of an agent, which starts workers on another machine."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from flambeau.errors import PlacementFailed
from flambeau.wire.cluster_messages import (
    ControlChannel,
    Ended,
    FileInfo,
    FilePiece,
    FindPort,
    FoundPort,
    FromAgent,
    Joined,
    Look,
    Looked,
    Prepare,
    Prepared,
    Printed,
    RemoteFiles,
    Started,
    TakeStacks,
    ToAgent,
    TookStacks,
    Usage,
    WantPieces,
    from_agent_decoder,
)
from flambeau.wire.model_files import digest_of, list_files

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # the event loop encrypts one in about a millisecond
ANSWER_S = 60.0  # for an agent to answer what takes no time
INSPECTION_S = 5.0  # for an agent to look at a worker


class Hosted(Protocol):
    """A worker process that an agent watches."""

    def on_started(self, message: Started) -> None: ...

    def on_output(self, message: Printed) -> None: ...

    def on_ended(self, message: Ended) -> None: ...

    def on_usage(self, resident_bytes: int, *, is_stopped: bool) -> None: ...


class AgentLink:
    """Messages of one agent, by worker; questions and their answers."""

    def __init__(self, on_joined: Callable[[AgentLink], None], on_closed: Callable[[AgentLink], None]) -> None:
        self.joined: Joined | None = None
        self.workers: dict[str, Hosted] = {}
        self._on_joined = on_joined
        self._on_closed = on_closed
        self._serials = itertools.count(1)
        self._num_messages = 0  # of the agent
        self._answers: dict[int, asyncio.Future[FromAgent]] = {}
        self.channel: ControlChannel[FromAgent] = ControlChannel(from_agent_decoder, self._on_message, self._closed)

    @property
    def is_open(self) -> bool:
        return self.joined is not None and self.channel.is_open

    def send(self, message: ToAgent) -> None:
        self.channel.send(message)

    def close(self) -> None:
        self.channel.close()
        self._forget_questions()  # an agent that hangs takes no goodbye: its connection ends later

    def expect_message(self, timeout_s: float, on_silent: Callable[[], None]) -> None:
        """Ask for a sign of life; `on_silent` is called if the agent says nothing at all within this time."""
        num_messages = self._num_messages

        def check() -> None:
            if self._num_messages == num_messages:
                on_silent()

        self.send(Look(next(self._serials), ""))
        asyncio.get_running_loop().call_later(timeout_s, check)

    async def find_port(self) -> int:
        """A free port of its machine."""
        serial = next(self._serials)
        async with asyncio.timeout(ANSWER_S):
            answer = await self._ask(serial, FindPort(serial))
        assert isinstance(answer, FoundPort)
        return answer.port

    async def look(self, worker: str) -> Looked:
        """What the kernel there knows of a worker's process; raises PlacementFailed or TimeoutError."""
        serial = next(self._serials)
        async with asyncio.timeout(INSPECTION_S):
            answer = await self._ask(serial, Look(serial, worker))
        assert isinstance(answer, Looked)
        return answer

    async def take_stacks(self, worker: str, after_s: float) -> TookStacks:
        """The stacks of a worker, a moment later; raises PlacementFailed or TimeoutError."""
        serial = next(self._serials)
        async with asyncio.timeout(INSPECTION_S):
            answer = await self._ask(serial, TakeStacks(serial, worker, after_s))
        assert isinstance(answer, TookStacks)
        return answer

    async def prepare(self, folder: Path, remote: Sequence[RemoteFiles] = ()) -> str:
        """Where the files of a model are on its machine. Raises PlacementFailed.

        Files that it does not have are sent, unless it can get them from where they came from.
        """
        files = await asyncio.to_thread(list_files, folder)
        serial = next(self._serials)
        answer = await self._ask(serial, Prepare(serial, str(folder), files))
        if isinstance(answer, Prepared) and not answer.folder:
            digest = await asyncio.to_thread(digest_of, folder)
            serial = next(self._serials)
            answer = await self._ask(serial, Prepare(serial, str(folder), files, digest, [*remote]))
            while isinstance(answer, WantPieces):
                if answer.problem:
                    logger.warning("%s could not get a model by itself: %s", self._host, answer.problem)
                held = {*answer.held}
                answer = await self._send_files(serial, folder, [file for file in files if file.path not in held])
        assert isinstance(answer, Prepared)
        if not answer.folder:
            raise PlacementFailed(f"its model could not be stored on {self._host}: {answer.reason}")
        return answer.folder

    async def _send_files(self, serial: int, folder: Path, files: list[FileInfo]) -> FromAgent:
        logger.info("sending %s to %s, %d MB", folder, self._host, sum(file.size for file in files) >> 20)
        done = self._answers[serial] = asyncio.get_running_loop().create_future()
        for file in files:
            for start in range(0, file.size or 1, PIECE_BYTES):  # an empty file has one piece
                data = await asyncio.to_thread(read_piece, folder / file.path, start)
                self.send(FilePiece(serial, file.path, data))
                await self.channel.drain()
                if done.done():  # it cannot store them, or is gone
                    return await self._wait(serial, done)
        self.send(FilePiece(serial, "", b""))
        return await self._wait(serial, done)

    async def _ask(self, serial: int, message: ToAgent) -> FromAgent:
        answer = self._answers[serial] = asyncio.get_running_loop().create_future()
        self.send(message)
        if not self.channel.is_open:
            answer.set_exception(self._gone())
        return await self._wait(serial, answer)

    async def _wait(self, serial: int, answer: asyncio.Future[FromAgent]) -> FromAgent:
        try:
            return await answer
        finally:
            self._answers.pop(serial, None)

    @property
    def _host(self) -> str:
        return self.joined.host if self.joined is not None else "a machine"

    def _gone(self) -> PlacementFailed:
        return PlacementFailed(f"the agent on {self._host} was lost")

    def _on_message(self, message: FromAgent) -> None:
        self._num_messages += 1
        if isinstance(message, Joined):
            self.joined = message
            self._on_joined(self)
        elif isinstance(message, FoundPort | Looked | TookStacks | Prepared | WantPieces):
            answer = self._answers.get(message.serial)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, Usage):
            for name, resident_bytes, is_stopped in message.workers:
                if name in self.workers:
                    self.workers[name].on_usage(resident_bytes, is_stopped=is_stopped)
        elif (worker := self.workers.get(message.worker)) is not None:
            if isinstance(message, Started):
                worker.on_started(message)
            elif isinstance(message, Printed):
                worker.on_output(message)
            else:
                worker.on_ended(message)

    def _closed(self, reason: str) -> None:
        self._forget_questions()
        self._on_closed(self)

    def _forget_questions(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._gone())


def read_piece(path: Path, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(PIECE_BYTES)
