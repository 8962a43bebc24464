"""The three priorities of jobs, and which is served next. Pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flambeau.errors import BadRequest

HEADER = "x-flambeau-priority"
HIGH, NORMAL, LOW = range(3)
PRIORITIES = ("high", "normal", "low")
# A waiting priority gets at least every ninth place: it is slowed down, never starved.
MAX_PASSED_OVER = 8

_HEADER_SIZE = len(HEADER)


def priority_of(headers: Iterable[tuple[str, str]]) -> int:
    """The priority in a request's headers; raises BadRequest if it is unknown."""
    for name, value in headers:
        if len(name) == _HEADER_SIZE and name.lower() == HEADER:
            return priority_named(value)
    return NORMAL


def priority_named(name: str) -> int:
    try:
        return PRIORITIES.index(name.strip().lower())
    except ValueError:
        raise BadRequest(f"{HEADER} is {name!r}; write one of: {', '.join(PRIORITIES)}") from None


def next_priority(is_waiting: Sequence[bool], passed_over: Sequence[int]) -> int:
    """The priority whose job leaves next: the highest with a job, unless a lower one was passed over too often.

    At least one priority must have a job.
    """
    candidates = [rank for rank in range(len(PRIORITIES)) if is_waiting[rank]]
    for rank in candidates:
        if passed_over[rank] >= MAX_PASSED_OVER:
            return rank
    return candidates[0]
