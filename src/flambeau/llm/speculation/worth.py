"""Worth: how many tokens it pays to propose, from what steps have taken and kept so far; without a clock of its own."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

WINDOW = 16  # times that are remembered of each number of tokens, and steps between two looks at them
TRIAL = 4  # steps that a number of tokens is given before it is judged
FIRST_WAIT, LONGEST_WAIT = 128, 8192  # steps until another number is tried; twice as many each time nothing changes
MEMORY = 64  # steps over which what is kept is averaged


def sensible_numbers(most: int) -> list[int]:
    """How many tokens may be proposed: as many as allowed, none, and some between that are worth telling apart."""
    return [most, 0, *(number for number in (1, 2, 3, 5, 8) if number < most)]


class _Kept:
    """How likely a token at each place is kept, those before it included."""

    def __init__(self, most: int) -> None:
        self._shares = [0.0] * most
        self._weights = [0.0] * most

    def note(self, num_ahead: int, kept: Sequence[int]) -> None:
        for place in range(num_ahead):
            share = sum(number > place for number in kept) / len(kept)
            self._weights[place] = min(self._weights[place] + 1, MEMORY)
            self._shares[place] += (share - self._shares[place]) / self._weights[place]

    def num_tokens(self, num_ahead: int) -> float:
        """Tokens that a step makes for each sequence: the network's own, and the proposals that are kept."""
        return 1 + sum(self._shares[:num_ahead])


class _Choice:
    """The number of tokens for one size of a batch."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._seconds: dict[int, deque[float]] = {number: deque(maxlen=WINDOW) for number in numbers}
        self._kept = _Kept(max(numbers))
        self._best = numbers[0]
        self._trial: int | None = numbers[0]  # at first, each of them is tried
        self._left = TRIAL  # steps until the trial or the wait is over
        self._wait = FIRST_WAIT
        self._next = 1
        self._until_look = WINDOW

    @property
    def number(self) -> int:
        """What the next step proposes."""
        return self._best if self._trial is None else self._trial

    def note(self, num_ahead: int, seconds: float, kept: Sequence[int]) -> None:
        if num_ahead not in self._seconds:
            return
        self._seconds[num_ahead].append(seconds)
        self._kept.note(num_ahead, kept)
        self._left -= 1
        self._until_look -= 1
        if self._left <= 0:
            self._end_trial() if self._trial is not None else self._begin_trial()
        elif self._until_look <= 0 and self._trial is None:
            self._look()

    def _begin_trial(self) -> None:
        others = [number for number in self._numbers if number != self._best]
        self._trial, self._left = others[self._next % len(others)], TRIAL
        self._next += 1

    def _end_trial(self) -> None:
        untried = [number for number in self._numbers if not self._seconds[number]]
        if untried:
            self._trial, self._left = untried[0], TRIAL
            return
        before = self._best
        self._look()
        self._wait = min(2 * self._wait, LONGEST_WAIT) if self._best == before else FIRST_WAIT
        self._trial, self._left = None, self._wait

    def _look(self) -> None:
        self._best = max(self._numbers, key=self._tokens_per_s)
        self._until_look = WINDOW

    def _tokens_per_s(self, number: int) -> float:
        # The median of the times, for a step may be held up by anything.
        return self._kept.num_tokens(number) / max(statistics.median(self._seconds[number]), 1e-9)


class Worth:
    """Says how many tokens to propose next, for each size of a batch by itself."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._choices: dict[int, _Choice] = {}

    def num_ahead(self, batch_size: int) -> int:
        """How many tokens to propose for each sequence in the next step; 0: none."""
        return self._of(batch_size).number

    def note(self, num_ahead: int, seconds: float, kept: Sequence[int]) -> None:
        """A step took so long, and so many proposals were kept of each sequence."""
        self._of(len(kept)).note(num_ahead, seconds, kept)

    def _of(self, batch_size: int) -> _Choice:
        size = batch_size.bit_length()  # 1, 2–3, 4–7, 8–15 …
        if size not in self._choices:
            self._choices[size] = _Choice(self._numbers)
        return self._choices[size]
