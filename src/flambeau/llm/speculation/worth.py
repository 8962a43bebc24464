"""Worth: whether speculation pays, from what steps with and without it have taken; without a clock of its own."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

WINDOW = 16  # steps that are remembered of each way
TRIAL = 4  # steps that one way is given before it is judged
FIRST_WAIT, LONGEST_WAIT = 128, 8192  # steps until the other way is tried again; twice as many each time it loses


@dataclass(slots=True)
class _Way:
    """The last steps of one way: how long they took, and the tokens each sequence got."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note(self, seconds: float, tokens: float) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)

    @property
    def rate(self) -> float:
        """Tokens per second; the median of the times, for a step may be held up by anything."""
        return statistics.fmean(self.tokens) / max(statistics.median(self.seconds), 1e-9)


class _Trials:
    """Which way the steps of one batch size go."""

    def __init__(self) -> None:
        self.ways = {True: _Way(), False: _Way()}
        self._is_on = True  # the better way so far
        self._trying: bool | None = None
        self._left = TRIAL  # steps until something is decided
        self._wait = FIRST_WAIT

    @property
    def is_on(self) -> bool:
        """Whether the next step speculates."""
        return self._is_on if self._trying is None else self._trying

    def note(self, is_on: bool, seconds: float, tokens: float) -> None:
        self.ways[is_on].note(seconds, tokens)
        if is_on != self.is_on:
            return
        self._left -= 1
        if self._left > 0:
            return
        if self._trying is None:
            self._trying, self._left = not self._is_on, TRIAL
        else:
            self._judge()

    def _judge(self) -> None:
        better = self.ways[True].rate > self.ways[False].rate
        self._wait = FIRST_WAIT if better != self._is_on else min(2 * self._wait, LONGEST_WAIT)
        self._is_on, self._trying, self._left = better, None, self._wait


class Worth:
    """Says how many tokens to propose next, for each size of a batch by itself."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._trials: dict[int, _Trials] = {}

    def num_ahead(self, batch_size: int) -> int:
        """How many tokens to propose for each sequence in the next step; 0: none."""
        return self._most if self._of(batch_size).is_on else 0

    def note(self, batch_size: int, num_ahead: int, seconds: float, num_tokens: int) -> None:
        """A step of so many sequences took so long and made so many tokens."""
        self._of(batch_size).note(num_ahead > 0, seconds, num_tokens / batch_size)

    def _of(self, batch_size: int) -> _Trials:
        return self._trials.setdefault(batch_size.bit_length(), _Trials())  # 1, 2–3, 4–7, 8–15 …
