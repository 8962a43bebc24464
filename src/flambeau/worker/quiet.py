"""What a rank other than 0 says: that it is ready, that it failed, and that it is done; rank 0 answers for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Failed, Part, Ready, ToServer, ToWorker


class QuietChannel(WorkerChannel):
    """A channel that lets replies through only as word of their end, without what they hold."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.socket = channel.socket
        self._inner = channel

    def send(self, messages: Sequence[ToServer]) -> None:
        """Send what the server must know of this rank."""
        kept: list[ToServer] = []
        for message in messages:
            if isinstance(message, Part):
                kept += [Part(message.job_id, b"")] if message.last else []
            elif isinstance(message, Ready | Failed):
                kept.append(message)
        if kept:
            self._inner.send(kept)

    def receive(self) -> ToWorker | None:
        """The next message; None when the server has gone."""
        return self._inner.receive()

    def poll(self) -> deque[ToWorker]:
        """Everything that has arrived and was not received yet, without waiting."""
        return self._inner.poll()
