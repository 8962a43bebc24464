"""The server's end of a worker's channel: over a socket by hand, and without a socket."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence

from flambeau.wire.channel import PREFIX, decode_to_server, to_frame
from flambeau.wire.messages import Failed, Part, Samples, ToServer, ToWorker


class Peer:
    """Sends and receives frames as a server does."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, *messages) -> None:
        self.sock.sendall(b"".join(to_frame([message]) for message in messages))

    def receive(self) -> list:
        size = int.from_bytes(self._exactly(PREFIX), "little")
        return decode_to_server(memoryview(self._exactly(size)))

    def receive_until(self, count: int) -> list:
        messages: list = []
        while len(messages) < count:
            messages += [message for message in self.receive() if not isinstance(message, Samples)]
        return messages

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "the worker closed the channel"
            data += more
        return data


class FakeChannel:
    """A worker's channel without a connection: receives `waiting` in order, and keeps what is sent.

    When nothing waits, the server is gone.
    """

    def __init__(self, *messages: ToWorker) -> None:
        self.socket: socket.socket | None = None
        self.waiting = deque(messages)
        self.frames: list[list[ToServer]] = []

    def send(self, messages: Sequence[ToServer]) -> None:
        self.frames.append([*messages])

    def receive(self) -> ToWorker | None:
        return self.waiting.popleft() if self.waiting else None

    def poll(self) -> deque[ToWorker]:
        return self.waiting

    @property
    def sent(self) -> list[ToServer]:
        return [message for frame in self.frames for message in frame]

    def parts(self, job_id: int) -> list[tuple[bytes, bool]]:
        """(body, whether it is the last) of each part of a job."""
        return [(p.body, p.last) for p in self.sent if isinstance(p, Part) and p.job_id == job_id]

    @property
    def failures(self) -> list[tuple[list[int], int]]:
        return [(message.job_ids, message.status) for message in self.sent if isinstance(message, Failed)]
