"""AdaptiveK: how many tokens to propose, from the durations and acceptance of past steps. It reads no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

WINDOW = 16  # durations remembered for each number of tokens
TRIAL = 6  # steps with a number of tokens before it is judged
FIRST_WAIT, LONGEST_WAIT = 64, 1024  # steps until another number is tried; doubled each time nothing changes
MEMORY = 32  # steps over which acceptance is averaged
CATCH_UP_FACTOR = 4  # longer waits while nothing is proposed: a draft model must catch up before a trial
MIN_GAIN = 1.1  # less does not count: with proposals, steps are longer and sequences end at different times


def candidate_numbers(maximum: int) -> list[int]:
    """The numbers of tokens to try: the maximum, none, and some between."""
    return [maximum, 0, *(number for number in (1, 2, 3, 5, 8) if number < maximum)]


class _AcceptanceRates:
    """How often a token at each place is accepted, together with those before it."""

    def __init__(self, maximum: int) -> None:
        self._shares = [0.0] * maximum
        self._weights = [0.0] * maximum

    def record(self, num_ahead: int, num_accepted: Sequence[int]) -> None:
        for place in range(num_ahead):
            share = sum(number > place for number in num_accepted) / len(num_accepted)
            self._weights[place] = min(self._weights[place] + 1, MEMORY)
            self._shares[place] += (share - self._shares[place]) / self._weights[place]

    def num_tokens(self, num_ahead: int) -> float:
        """Expected tokens per step and sequence: the target's own and the accepted ones."""
        return 1 + sum(self._shares[:num_ahead])


class _BatchChoice:
    """The number of tokens for one kind of batch."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._seconds: dict[int, deque[float]] = {number: deque(maxlen=WINDOW) for number in numbers}
        self._acceptance = _AcceptanceRates(max(numbers))
        self._best = numbers[0]
        self._trial: int | None = numbers[0]  # at first, each number is tried
        self._left = TRIAL  # steps until the trial or the wait ends
        self._wait = FIRST_WAIT
        self._tried = [*numbers]  # the number tried last comes last
        self._is_turn_of_rival = True

    @property
    def number(self) -> int:
        return self._best if self._trial is None else self._trial

    def record(self, num_ahead: int, seconds: float, num_accepted: Sequence[int]) -> None:
        if num_ahead not in self._seconds:
            return
        self._seconds[num_ahead].append(seconds)
        self._acceptance.record(num_ahead, num_accepted)
        self._left -= 1
        if self._trial is not None:
            if self._left <= 0:
                self._end_trial(self._trial)
        elif self._left <= 0 or (self._left % WINDOW == 0 and self._has_rival()):
            self._begin_trial()

    def _has_rival(self) -> bool:
        """Whether another number seems better by now, for example because fewer tokens are accepted."""
        return max(self._numbers, key=self._tokens_per_s) != self._best

    def _begin_trial(self) -> None:
        """Try the best of the others, alternating with the one that was not tried for the longest time."""
        others = [number for number in self._tried if number != self._best]
        rival = max(others, key=self._tokens_per_s)
        self._try(rival if self._has_rival() or self._is_turn_of_rival else others[0])
        self._is_turn_of_rival = not self._is_turn_of_rival
        self._seconds[self.number].clear()  # the load of the machine may have changed

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
        self._trial, self._left = None, self._wait * (1 if self._best else CATCH_UP_FACTOR)

    def _tokens_per_s(self, number: int) -> float:
        # The lower quartile: other processes may delay a step, and nothing makes one faster than it is.
        seconds = sorted(self._seconds[number])
        rate = self._acceptance.num_tokens(number) / max(seconds[len(seconds) // 4], 1e-9)
        return rate / MIN_GAIN if number else rate


class AdaptiveK:
    """The number of tokens to propose next, learned separately for each kind of batch."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._choices: dict[Hashable, _BatchChoice] = {}

    def num_ahead(self, kind: Hashable) -> int:
        return self._of(kind).number

    def record(self, kind: Hashable, num_ahead: int, seconds: float, num_accepted: Sequence[int]) -> None:
        """Add the duration of a step and the accepted tokens of each sequence."""
        self._of(kind).record(num_ahead, seconds, num_accepted)

    def _of(self, kind: Hashable) -> _BatchChoice:
        if kind not in self._choices:
            self._choices[kind] = _BatchChoice(self._numbers)
        return self._choices[kind]
