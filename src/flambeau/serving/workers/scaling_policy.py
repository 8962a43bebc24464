"""ScalingPolicy: how many workers a model should have. Decisions without effects; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_IDLE_S = 60.0
SETTLE_S = 1.0  # after a change, until the next one
PATIENCE_OF_LOAD = 0.1  # share of a worker's load time for which jobs must be late before one is added
MAX_PATIENCE_S = 5.0
ROOM = 1.1  # memory that must be free for one more worker, in sizes of a present one


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """The bounds of the number of workers, how long jobs may wait, and how long workers may be idle."""

    minimum: int
    maximum: int
    target_queue_s: float = 0.1
    idle_s: float = DEFAULT_IDLE_S
    scales_to_zero: bool = False

    @property
    def leave_room(self) -> bool:
        """Whether the number of workers can change at all."""
        return self.maximum > self.minimum or self.allow_sleep

    @property
    def allow_sleep(self) -> bool:
        """Whether a model may have no worker until a job arrives."""
        return self.maximum > 0 and (self.scales_to_zero or self.minimum == 0)

    @property
    def awake(self) -> int:
        """The fewest workers of a model that does not sleep."""
        return max(1, self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """The load of a model at one moment."""

    present: int  # workers that run, load or wait for a restart
    ready: int
    busy: int  # with at least one batch
    wait_s: float  # how long the next job has waited; 0 without one
    quiet_s: float  # since the last job arrived
    load_s: float = 0.0  # how long a worker took to load


class ScalingPolicy:
    """Decides from a series of samples; changes the number of workers by one at a time, or to zero."""

    def __init__(self, now: float) -> None:
        self._changed = now
        self._late_since: float | None = None  # jobs wait longer than they should
        self._last_full = now  # when every worker was needed

    def decide(self, sample: LoadSample, limits: ScalingLimits, now: float) -> int:
        """The number of workers that the model should have."""
        self._note(sample, limits, now)
        wanted = self._choose(sample, limits, now)
        if wanted != sample.present:
            self._changed = self._last_full = now
            self._late_since = None
        return wanted

    def _note(self, sample: LoadSample, limits: ScalingLimits, now: float) -> None:
        is_full = sample.busy >= sample.present
        if sample.ready < sample.present:
            self._changed = now
        if is_full or sample.wait_s > 0:
            self._last_full = now
        if sample.wait_s <= limits.target_queue_s or not is_full:  # with an idle worker, jobs wait to fill a batch
            self._late_since = None
        elif self._late_since is None:
            self._late_since = now

    def _choose(self, sample: LoadSample, limits: ScalingLimits, now: float) -> int:
        present = sample.present
        if sample.ready < present:
            return present  # a worker loads or fails to: more of them would not help
        if now - self._changed < SETTLE_S:
            return present
        if self._late_since is not None and now - self._late_since >= patience_s(sample.load_s):
            return max(present, min(present + 1, limits.maximum))
        is_quiet = not sample.busy and sample.wait_s == 0 and sample.quiet_s >= limits.idle_s
        if is_quiet and now - self._changed >= limits.idle_s:
            return min(present, 0 if limits.allow_sleep else limits.awake)
        if present > limits.awake and now - self._last_full >= limits.idle_s:
            return present - 1
        return present


def patience_s(load_s: float) -> float:
    """How long jobs must be late before a worker is added: longer for workers that take long to load."""
    return min(load_s * PATIENCE_OF_LOAD, MAX_PATIENCE_S)


def has_room(available_bytes: int | None, worker_bytes: int) -> bool:
    """Whether memory allows one more worker; yes if the available memory is unknown."""
    return available_bytes is None or available_bytes > worker_bytes * ROOM
