"""Who goes first: three classes of jobs, and whose turn it is; pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flambeau.errors import BadRequest

HEADER = "x-flambeau-priority"
HIGH, NORMAL, LOW = range(3)
CLASSES = ("high", "normal", "low")
# A class that waits while others are served gets every ninth place at least: it is slowed down, never stopped.
MOST_PASSED_OVER = 8

_HEADER_SIZE = len(HEADER)


def priority_of(headers: Iterable[tuple[str, str]]) -> int:
    """The class a request asks for by its header; raises BadRequest for one that does not exist."""
    for name, value in headers:
        if len(name) == _HEADER_SIZE and name.lower() == HEADER:
            return priority_named(value)
    return NORMAL


def priority_named(name: str) -> int:
    """The class of that name."""
    try:
        return CLASSES.index(name.strip().lower())
    except ValueError:
        raise BadRequest(f"{HEADER} is {name!r}; write one of: {', '.join(CLASSES)}") from None


def next_class(is_waiting: Sequence[bool], passed_over: Sequence[int]) -> int:
    """Which class sends the next job: the highest that has one, unless a lower one was passed over too often.

    At least one class must have a job.
    """
    candidates = [rank for rank in range(len(CLASSES)) if is_waiting[rank]]
    for rank in candidates:
        if passed_over[rank] >= MOST_PASSED_OVER:
            return rank
    return candidates[0]
