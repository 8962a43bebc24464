"""How many workers a model should have now, between its limits; decisions without effects, with time as an argument."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_IDLE_S = 60.0
SETTLE_S = 1.0  # after a change, so that its effect shows before the next one
PATIENCE_OF_LOAD = 0.1  # of the time a worker takes to load, jobs must wait too long before one is added
MAX_PATIENCE_S = 5.0
ROOM = 1.1  # memory that must be free for one more worker, in sizes of a present one


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Between which numbers, and by what: how long jobs may wait, and how long workers may have nothing to do."""

    minimum: int
    maximum: int
    target_queue_s: float = 0.1
    idle_s: float = DEFAULT_IDLE_S
    scales_to_zero: bool = False

    @property
    def leave_room(self) -> bool:
        """Whether there is anything to decide."""
        return self.maximum > self.minimum or self.allow_sleep

    @property
    def allow_sleep(self) -> bool:
        """Whether a model may have no worker until somebody asks for it."""
        return self.maximum > 0 and (self.scales_to_zero or self.minimum == 0)

    @property
    def awake(self) -> int:
        """The fewest workers of a model that does not sleep."""
        return max(1, self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is seen of a model at one moment."""

    present: int  # workers it has or is starting
    ready: int
    busy: int  # that hold a batch
    wait_s: float  # how long the job that leaves next has waited; 0 when none does
    quiet_s: float  # how long ago the last job arrived
    load_s: float = 0.0  # how long a worker took to load


class Autoscaler:
    """Looks at a model now and then, and says how many workers it should have."""

    def __init__(self, now: float) -> None:
        self._changed = now
        self._late_since: float | None = None  # jobs wait longer than they should
        self._last_full = now  # when every worker was needed

    def look(self, sight: Sight, limits: Limits, now: float) -> int:
        """The number of workers wanted: one more, one less, none at all, or as many as there are."""
        self._take_note(sight, limits, now)
        wanted = self._decide(sight, limits, now)
        if wanted != sight.present:
            self._changed = self._last_full = now
            self._late_since = None
        return wanted

    def _take_note(self, sight: Sight, limits: Limits, now: float) -> None:
        is_full = sight.busy >= sight.present
        if sight.ready < sight.present:
            self._changed = now
        if is_full or sight.wait_s > 0:
            self._last_full = now
        if sight.wait_s <= limits.target_queue_s or not is_full:  # where somebody idles, jobs wait for company
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now

    def _decide(self, sight: Sight, limits: Limits, now: float) -> int:
        present = sight.present
        if sight.ready < present:
            return present  # somebody starts, or cannot: more of them would not help
        if now - self._changed < SETTLE_S:
            return present
        if self._late_since is not None and now - self._late_since >= patience_s(sight.load_s):
            return max(present, min(present + 1, limits.maximum))
        is_quiet = not sight.busy and sight.wait_s == 0 and sight.quiet_s >= limits.idle_s
        if is_quiet and now - self._changed >= limits.idle_s:
            return min(present, 0 if limits.allow_sleep else limits.awake)
        if present > limits.awake and now - self._last_full >= limits.idle_s:
            return present - 1
        return present


def patience_s(load_s: float) -> float:
    """How long jobs must have waited too long: the longer a worker takes to load, the surer it must be of use."""
    return min(load_s * PATIENCE_OF_LOAD, MAX_PATIENCE_S)


def has_room(available_bytes: int | None, worker_bytes: int) -> bool:
    """Whether memory allows one more worker like those there are; yes where memory cannot be told."""
    return available_bytes is None or available_bytes > worker_bytes * ROOM
