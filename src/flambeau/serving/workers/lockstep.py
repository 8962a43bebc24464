"""Lockstep: ranks that compute together get one batch at a time, and the next when all are done. Pure.

The ranks of a tensor-parallel model must make the same calls in the same order, or they block each other or mix up
two requests. So a batch goes to all ranks, running jobs are not cancelled, and the end of a reply is passed on when
every rank has finished it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flambeau.wire.messages import Cancel, Failed, Load, Part, Run, Samples, Stop, ToServer, ToWorker, cancelled


class Lockstep:
    """Translates between the server, which sees one worker, and its ranks. Methods return the messages to send."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: deque[Run | Stop] = deque()
        self._ends: dict[int, ToServer | None] = {}  # job of the running batch → rank 0's last message about it
        self._left: dict[int, set[int]] = {}  # job of the running batch → ranks that have not finished it

    @property
    def stragglers(self) -> list[int]:
        """The ranks that have not finished the running batch, once rank 0 has."""
        if not self._left or any(end is None for end in self._ends.values()):
            return []
        return sorted(set().union(*self._left.values()))

    def to_ranks(self, message: Load | Run | Stop) -> list[ToWorker]:
        """The messages for every rank, after one of the server."""
        if isinstance(message, Run | Stop):
            self._waiting.append(message)
            return self._proceed()
        return [message]

    def cancel(self, message: Cancel) -> list[ToServer]:
        """Answer for jobs that are not begun; running jobs are not cancelled."""
        dropped: list[ToServer] = []
        for i, waiting in enumerate(self._waiting):
            if isinstance(waiting, Run):
                gone = [job.job_id for job in waiting.jobs if job.job_id in message.job_ids]
                self._waiting[i] = Run([job for job in waiting.jobs if job.job_id not in gone])
                dropped += [cancelled(job_id) for job_id in gone]
        return dropped

    def from_rank(self, rank: int, messages: Sequence[ToServer]) -> tuple[list[ToServer], list[ToWorker]]:
        """The messages for the server and for every rank, after those of one rank."""
        to_server: list[ToServer] = []
        for message in messages:
            if isinstance(message, Part) and message.last:
                to_server += self._end(rank, message.job_id, message)
            elif isinstance(message, Failed):
                for job_id in message.job_ids:
                    to_server += self._end(
                        rank, job_id, Failed([job_id], message.status, message.message, message.detail)
                    )
            elif rank == 0 and isinstance(message, Part | Samples):
                to_server.append(message)
        return to_server, [] if self._left else self._proceed()

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
        """The next batch if none runs; a stop after everything before it."""
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
