"""ReplyBudget: what one port holds for clients that do not read their replies. Without effects; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

TOTAL_BYTES, TOTAL_REPLIES = 256 << 20, 4  # held at a port, at most: bytes or whole replies; the larger counts
MAX_HELD_BYTES = 4 << 20  # of one reply, before it is paused
MAX_SHARE = 16  # one reply is paused at a sixteenth of what is free, so that there is always room for another
STEADY_BYTES = 1 << 20  # a client that reads this much in time, or all there is, is not stalled
HELD_UP_S = 5.0  # the time to read STEADY_BYTES while other jobs wait for the same worker

DRAINED_BYTES = 1 << 20  # returning memory takes about a millisecond

Holder = TypeVar("Holder")


@dataclass(slots=True)
class UnreadReply:
    """What is held for one client."""

    began: float
    held_bytes: int
    read_bytes: int  # by the client, since it fell behind
    checked_at: float  # when it had read `checked_bytes`
    checked_bytes: int


class ReplyBudget(Generic[Holder]):
    """Says which replies are paused and which are cut. Only clients that have fallen behind are counted.

    A reply is paused when it holds more than a share of what is free: the more is held, the smaller the share, so a
    few that hold much leave room for many that hold little. Replies that cannot be paused are cut when the total is
    over the limit: those with more than an equal share of it, the one that has held most for longest first.
    """

    def __init__(self, max_reply_bytes: int = 0, *, total_bytes: int = TOTAL_BYTES) -> None:
        self._limit_bytes = max(total_bytes, TOTAL_REPLIES * max_reply_bytes)
        self._unread: dict[Holder, UnreadReply] = {}
        self.held_bytes = 0
        self._peak_bytes = 0  # since memory was returned

    @property
    def pause_above_bytes(self) -> int:
        """A reply that holds more is paused."""
        return min(MAX_HELD_BYTES, max(0, self._limit_bytes - self.held_bytes) // MAX_SHARE)

    @property
    def is_exceeded(self) -> bool:
        return self.held_bytes > self._limit_bytes

    def hold(self, holder: Holder, held_bytes: int, now: float, *, added_bytes: int = 0) -> None:
        """Note what is held for a client now, of which `added_bytes` are new."""
        unread = self._unread.get(holder)
        if unread is None:
            self._unread[holder] = UnreadReply(now, held_bytes, 0, now, 0)
            self._count(held_bytes)
            return
        unread.read_bytes += max(0, unread.held_bytes + added_bytes - held_bytes)
        self._count(held_bytes - unread.held_bytes)
        unread.held_bytes = held_bytes

    def _count(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)

    def take_drained(self) -> bool:
        """Whether much was held and little is now: the allocator keeps that memory. True once each time."""
        if self._peak_bytes < DRAINED_BYTES or self.held_bytes > self._peak_bytes // 4:
            return False
        self._peak_bytes = self.held_bytes
        return True

    def release(self, holder: Holder) -> None:
        """The client has read what was held, or has disconnected."""
        unread = self._unread.pop(holder, None)
        if unread is not None:
            self.held_bytes -= unread.held_bytes

    def to_cut(self, now: float) -> list[Holder]:
        """The replies to cut, so that the rest is within the limit."""
        excess = self.held_bytes - self._limit_bytes
        if excess <= 0:
            return []
        equal_share = self._limit_bytes / len(self._unread)
        candidates = [(holder, unread) for holder, unread in self._unread.items() if unread.held_bytes > equal_share]
        candidates.sort(key=lambda one: one[1].held_bytes * (now - one[1].began), reverse=True)
        chosen = []
        for holder, unread in candidates:
            chosen.append(holder)
            excess -= unread.held_bytes
            if excess <= 0:
                break
        return chosen

    def stalled(self, now: float, patience_s: float) -> list[Holder]:
        """The clients that took longer than `patience_s` to read STEADY_BYTES."""
        found = []
        for holder, unread in self._unread.items():
            if unread.read_bytes - unread.checked_bytes >= STEADY_BYTES:
                unread.checked_at, unread.checked_bytes = now, unread.read_bytes
            elif now - unread.checked_at > patience_s:
                found.append(holder)
        return found


def resume_below_bytes(pause_above_bytes: int) -> int:
    """A reply that was paused above the one goes on below the other."""
    return pause_above_bytes * 3 // 4


def hold_up_s(excess_bytes: int) -> float:
    """How long a paused reply may hold up other jobs, until its client has read `excess_bytes`."""
    return HELD_UP_S * max(1.0, excess_bytes / STEADY_BYTES)
