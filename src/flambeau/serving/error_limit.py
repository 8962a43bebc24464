"""ErrorLimit: when a new version has failed so often that it gets no more requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

FAILED_FROM = 500  # statuses that are the server's fault
MIN_ANSWERS = 20  # fewer decide nothing
WINDOW = 100  # the last so many answers count, and up to twice as many


@dataclass(frozen=True, slots=True)
class Tally:
    """Answers and the failed ones among them, up to some moment."""

    answers: int
    failed: int

    @classmethod
    def of(cls, answers: Counter[int], num_broken: int = 0) -> Tally:
        """`num_broken` of the answers have begun well and were broken off."""
        failed = sum(number for status, number in answers.items() if status >= FAILED_FROM)
        return cls(answers.total(), failed + num_broken)

    def since(self, earlier: Tally) -> Tally:
        return Tally(self.answers - earlier.answers, self.failed - earlier.failed)


class ErrorLimit:
    """The percentage of failed answers that a version may have."""

    def __init__(self, percent: int, answers: Counter[int], num_broken: Callable[[], int] = lambda: 0) -> None:
        """`answers` is the count by status that goes on while this object lives."""
        self.percent = percent
        self._answers, self._num_broken = answers, num_broken
        self._from = self._middle = Tally.of(answers, num_broken())

    def excess(self) -> str:
        """By what the limit is exceeded; empty if it is not."""
        now = Tally.of(self._answers, self._num_broken())
        if now.answers - self._middle.answers >= WINDOW:
            self._from, self._middle = self._middle, now
        last = now.since(self._from)
        if last.answers < MIN_ANSWERS or last.failed * 100 <= self.percent * last.answers:
            return ""
        return f"{last.failed} of its last {last.answers} answers were errors of the server, more than {self.percent} %"
