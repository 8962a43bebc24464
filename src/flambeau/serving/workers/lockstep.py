"""Lockstep: ranks that compute together get one batch at a time, and the next when every one is done; pure.

Each rank of a tensor-parallel model must make the same calls in the same order, or they wait for each other for ever
or, worse, mix up two requests. So a batch is given to all, nobody is told of a cancellation in the middle of it, and
the end of a reply is passed on when the last rank has come to its end too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flambeau.wire.messages import Cancel, Failed, Load, Part, Run, Samples, Stop, ToServer, ToWorker, cancelled


class Lockstep:
    """Between the server, which sees one worker, and its ranks. Methods return what to send on."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: deque[Run | Stop] = deque()
        self._ends: dict[int, ToServer | None] = {}  # job of the running batch → rank 0's last word on it
        self._left: dict[int, set[int]] = {}  # the same → ranks that are not done with it

    @property
    def stragglers(self) -> list[int]:
        """Where rank 0 has said its last word on the running batch: the ranks that have not."""
        if not self._left or any(end is None for end in self._ends.values()):
            return []
        return sorted(set().union(*self._left.values()))

    def to_ranks(self, message: Load | Run | Stop) -> list[ToWorker]:
        """The server says something: what the ranks are told now."""
        if isinstance(message, Run | Stop):
            self._waiting.append(message)
            return self._proceed()
        return [message]

    def cancel(self, message: Cancel) -> list[ToServer]:
        """Answer for jobs that are not begun; those that run are run to their end."""
        dropped: list[ToServer] = []
        for i, waiting in enumerate(self._waiting):
            if isinstance(waiting, Run):
                gone = [job.job_id for job in waiting.jobs if job.job_id in message.job_ids]
                self._waiting[i] = Run([job for job in waiting.jobs if job.job_id not in gone])
                dropped += [cancelled(job_id) for job_id in gone]
        return dropped

    def from_rank(self, rank: int, messages: Sequence[ToServer]) -> tuple[list[ToServer], list[ToWorker]]:
        """A rank says something: what the server is told now, and what the ranks are."""
        told: list[ToServer] = []
        for message in messages:
            if isinstance(message, Part) and message.last:
                told += self._end(rank, message.job_id, message)
            elif isinstance(message, Failed):
                for job_id in message.job_ids:
                    told += self._end(rank, job_id, Failed([job_id], message.status, message.message, message.detail))
            elif rank == 0 and isinstance(message, Part | Samples):
                told.append(message)
        return told, [] if self._left else self._proceed()

    def _end(self, rank: int, job_id: int, message: ToServer) -> list[ToServer]:
        left = self._left.get(job_id)
        if left is None:
            return []
        left.discard(rank)
        if rank == 0:
            self._ends[job_id] = message
        if left:
            return []
        del self._left[job_id]
        end = self._ends.pop(job_id)
        return [end] if end is not None else []

    def _proceed(self) -> list[ToWorker]:
        """The next batch, if none runs; a stop, once everything before it is over."""
        if self._left:
            return []
        while self._waiting:
            message = self._waiting.popleft()
            if isinstance(message, Stop):
                return [message]
            if message.jobs:
                self._left = {job.job_id: set(range(self._num_ranks)) for job in message.jobs}
                self._ends = dict.fromkeys(self._left)
                return [message]
        return []
