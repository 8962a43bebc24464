"""Worth: how many tokens it pays to propose, from what steps have taken and kept so far; without a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

WINDOW = 16  # times that are remembered of each number of tokens
TRIAL = 6  # steps that a number of tokens is given before it is judged
FIRST_WAIT, LONGEST_WAIT = 64, 1024  # steps until another number is tried; twice as many each time nothing changes
MEMORY = 32  # steps over which what is kept is averaged
DEAR = 4  # times longer waits where nothing is proposed: a draft has to catch up before it can be tried
LEAST_GAIN = 1.1  # less is none: with proposals, steps are longer, and sequences end at different times


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
    """The number of tokens for one kind of batch."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._seconds: dict[int, deque[float]] = {number: deque(maxlen=WINDOW) for number in numbers}
        self._kept = _Kept(max(numbers))
        self._best = numbers[0]
        self._trial: int | None = numbers[0]  # at first, each of them is tried
        self._left = TRIAL  # steps until the trial or the wait is over
        self._wait = FIRST_WAIT
        self._tried = [*numbers]  # the one that was tried last comes last
        self._is_turn_of_rival = True

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
        if self._trial is not None:
            if self._left <= 0:
                self._end_trial(self._trial)
        elif self._left <= 0 or (self._left % WINDOW == 0 and self._has_rival()):
            self._begin_trial()

    def _has_rival(self) -> bool:
        """Whether another number seems better by now: fewer proposals are kept, say."""
        return max(self._numbers, key=self._tokens_per_s) != self._best

    def _begin_trial(self) -> None:
        """Try what seems best of the others, or in turn what was not tried for the longest time."""
        others = [number for number in self._tried if number != self._best]
        rival = max(others, key=self._tokens_per_s)
        self._try(rival if self._has_rival() or self._is_turn_of_rival else others[0])
        self._is_turn_of_rival = not self._is_turn_of_rival
        self._seconds[self.number].clear()  # the machine may be busier than it was, or less

    def _try(self, number: int) -> None:
        self._trial, self._left = number, TRIAL
        self._tried = [*(other for other in self._tried if other != number), number]

    def _end_trial(self, number: int) -> None:
        untried = [other for other in self._numbers if not self._seconds[other]]
        if untried:
            self._try(untried[0])
            return
        before = self._best
        known = self._numbers if self._wait == FIRST_WAIT else (before, number)
        self._best = max(known, key=self._tokens_per_s)
        self._wait = min(2 * self._wait, LONGEST_WAIT) if self._best == before else FIRST_WAIT
        self._trial, self._left = None, self._wait * (1 if self._best else DEAR)

    def _tokens_per_s(self, number: int) -> float:
        # One of the quicker steps counts: anything may hold a step up, and nothing makes it quicker than it is.
        seconds = sorted(self._seconds[number])
        rate = self._kept.num_tokens(number) / max(seconds[len(seconds) // 4], 1e-9)
        return rate / LEAST_GAIN if number else rate


class Worth:
    """Says how many tokens to propose next, for each kind of batch by itself: its size, say, and how it samples."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._choices: dict[Hashable, _Choice] = {}

    def num_ahead(self, kind: Hashable) -> int:
        """How many tokens to propose for each sequence in the next step; 0: none."""
        return self._of(kind).number

    def note(self, kind: Hashable, num_ahead: int, seconds: float, kept: Sequence[int]) -> None:
        """A step took so long, and so many proposals were kept of each sequence."""
        self._of(kind).note(num_ahead, seconds, kept)

    def _of(self, kind: Hashable) -> _Choice:
        if kind not in self._choices:
            self._choices[kind] = _Choice(self._numbers)
        return self._choices[kind]
