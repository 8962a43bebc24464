"""Whether a worker is slow or hangs. Without effects; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flambeau.serving.workers.process_state import Activity, ProcessState

NUM_BUCKETS = 32  # by powers of two of a millisecond
MIN_BATCHES = 20  # before times count as learned
MAX_BATCHES = 4096  # then all counts are halved, so that old batches count less
SLOW_FACTOR = 10  # times the usual time of a batch
MIN_SLOW_S = 1.0
MIN_LOOKS = 3  # that show the same sign: this server may have been held up in between
LOOP_FACTOR = 3  # an endless loop looks like work, so it gets longer than a stopped process
UNPROVEN_FACTOR = 12  # the same if the source does not show that the loop has no end: a single request may be slow
SYSTEM_SHARE = 0.2  # of computing time in the kernel, above which a loop makes system calls
MAX_STRAY_EVENTS = 10  # between two looks: the kernel causes some page faults itself
TICK_S = 0.011  # the kernel counts computing time in hundredths of a second

Hang = Literal["stopped", "locked", "computing"]


class StepTimes:
    """How long the batches of a model take."""

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0] * NUM_BUCKETS

    def add(self, seconds: float) -> None:
        self._counts[min(int(seconds * 1000).bit_length(), NUM_BUCKETS - 1)] += 1
        self.count += 1
        if self.count > MAX_BATCHES:
            self._counts = [count // 2 for count in self._counts]
            self.count = sum(self._counts)

    @property
    def is_learned(self) -> bool:
        return self.count >= MIN_BATCHES

    def at_most_s(self, share: float) -> float:
        """The time within which this share of the batches was done, rounded up to a power of two of a millisecond."""
        wanted, seen = share * self.count, 0
        for power, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return float(2**power) / 1000
        return 0.0

    @property
    def usual_s(self) -> float:
        """The time within which nearly every batch was done."""
        return self.at_most_s(0.99)


def slow_after_s(times: StepTimes, hang_s: float) -> float:
    """How long a batch may take before its worker is called slow."""
    return max(SLOW_FACTOR * times.usual_s, MIN_SLOW_S) if times.is_learned else max(hang_s, MIN_SLOW_S)


def hung_after_s(hang: Hang, times: StepTimes, hang_s: float, *, is_unproven: bool = False) -> float:
    """How long a worker may be like that before it is replaced."""
    if hang != "computing":
        return hang_s
    return max(SLOW_FACTOR * times.usual_s, (UNPROVEN_FACTOR if is_unproven else LOOP_FACTOR) * hang_s)


def needs_proof(hang: Hang, times: StepTimes) -> bool:
    """Whether it may just be slow. Computing is work, unless the model is known to be much quicker."""
    return hang == "computing" and not times.is_learned


@dataclass(slots=True)
class WorkerWatch:
    """What was seen of one worker while it made no progress."""

    hang: Hang | None = None
    num_looks: int = 0  # that showed it
    since: float = 0.0  # when it began to look like that
    since_user_s: float = 0.0  # its computing time then
    before: ProcessState | None = None
    is_unproven: bool = False  # it computes, and its source does not show that it never ends

    def see(self, state: ProcessState, now: float) -> None:
        """Note the state of its process."""
        hang = sign_of_hang(self.before, state)
        if hang != self.hang:
            self.hang, self.since, self.since_user_s = hang, now, state.user_s
            self.num_looks, self.is_unproven = 0, False
        self.num_looks += 1
        self.before = state

    def held_s(self, silent_s: float, now: float) -> float:
        """How long it has looked the same, at most since its last progress; a stopped process may be idle.

        Of a computation only the computing time counts: on a busy machine it may have got little.
        """
        if self.hang == "stopped":
            return now - self.since
        if self.hang == "computing" and self.before is not None:
            return min(self.before.user_s - self.since_user_s, silent_s)
        return min(now - self.since, silent_s)

    def has_lasted(self, silent_s: float, now: float, times: StepTimes, hang_s: float) -> bool:
        """Whether it hangs: the sign was seen often and for long enough."""
        if self.hang is None or self.num_looks < MIN_LOOKS:
            return False
        return self.held_s(silent_s, now) >= hung_after_s(self.hang, times, hang_s, is_unproven=self.is_unproven)

    def clear(self) -> None:
        """It made progress."""
        self.hang = self.before = None
        self.is_unproven = False


def sign_of_hang(before: ProcessState | None, state: ProcessState) -> Hang | None:
    """What a hang looks like that two looks at a process show; the first look shows only that it is stopped."""
    if state.activity == "stopped":
        return "stopped"
    if before is None or state.activity not in ("locked", "computing") or state.activity != before.activity:
        return None
    user_s, system_s = state.user_s - before.user_s, state.system_s - before.system_s
    if state.activity == "locked":
        return "locked" if user_s + system_s < TICK_S else None
    # A computation that gets anywhere allocates, reads, writes, or uses other threads. This one does none of it.
    if state.num_events - before.num_events > MAX_STRAY_EVENTS or system_s > max(TICK_S, SYSTEM_SHARE * user_s):
        return None
    return "computing"


def hang_in_words(hang: Hang, held_s: float, place: str, times: StepTimes) -> str:
    """The reason why a worker is replaced."""
    if hang == "stopped":
        return f"it hung: its process was stopped by a signal (SIGSTOP) for {held_s:.0f} s"
    if hang == "locked":
        where = f" ({place})" if place else ""
        return f"it hung: it waited {held_s:.0f} s for a lock that no other thread of it can release{where}"
    if needs_proof(hang, times):
        return f"it hung: it computed for {held_s:.0f} s in a loop that has no end ({place})"
    return (
        f"it hung: it computed for {held_s:.0f} s in the same function ({place}) and got nowhere; "
        f"its batches usually take at most {times.usual_s:g} s"
    )


def slowness_in_words(silent_s: float, activity: Activity | None, times: StepTimes) -> str:
    """What is said of a worker that takes long and may be at work."""
    usual = f"; usually at most {times.usual_s:g} s" if times.is_learned else ""
    doing = {"computing": "it computes", "locked": "it waits for a lock", "stopped": "it is stopped"}
    now = f", {doing.get(activity, 'it works or waits')}" if activity else ""
    return f"slow: no progress for {silent_s:.0f} s{now}{usual}"
