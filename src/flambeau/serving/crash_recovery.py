"""How a worker exited, and what follows: which jobs are retried and when the worker restarts. Pure decisions."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# Existing crash alerts rely on this rhythm. Only the first restart is immediate.
_DELAYS_S = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")
EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_RETRIES = 1  # crashes that a job survives …
MAX_FURTHER_RETRIES = 3  # … if its worker was killed from outside, or its reply has begun and can be resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """Why and how a worker exited."""

    reason: str
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    by_server: bool = False  # this server ended it
    spares_jobs: bool = False  # … for a reason that has nothing to do with its jobs
    while_loading: bool = False  # the model could not be loaded
    is_final: bool = False  # … and another attempt would fail too
    is_hung: bool = False  # this server ended it because it made no progress
    needs_install: bool = False  # … because a package that its handler needs is not installed
    last_lines: tuple[str, ...] = ()
    stacks: str = ""  # of its threads, if it hung

    @property
    def is_external(self) -> bool:
        """Whether neither the worker itself nor this server ended it."""
        return self.signal in EXTERNAL_SIGNALS and not self.by_server and not self.out_of_memory

    @property
    def cause(self) -> str:
        """The reason, followed by the worker's last lines of output."""
        return "\n".join([self.reason, *(f"  | {line}" for line in self.last_lines)])


def is_same_failure(one: WorkerExit, other: WorkerExit) -> bool:
    """Whether two workers failed alike: process ids, addresses and times may differ."""
    if (one.exit_code, one.signal) != (other.exit_code, other.signal):
        return False
    return _VARYING.sub("", one.cause) == _VARYING.sub("", other.cause)


def backoff_s(failures: int) -> float:
    """The delay before the restart after this many failures in a row."""
    return _DELAYS_S[min(failures, len(_DELAYS_S)) - 1]


def should_abandon(failures: int, waited_s: float, max_retry_s: float) -> bool:
    """Whether the next restart would exceed the time for retries.

    Only the delays between attempts count, not the time that a model takes to load.
    """
    return waited_s + backoff_s(failures) > max_retry_s


def should_retry(
    worker_exit: WorkerExit, *, batch_size: int, crashes: int, reply_started: bool, can_resume: bool = False
) -> bool:
    """Whether a job of an exited worker is retried. A job whose reply has begun must be resumable.

    A job that was alone in a worker that crashed by itself is the cause. One that was in a batch may be innocent,
    once, as may one whose worker hung: what it waited for may be there next time. One whose worker was killed from
    outside probably is: whoever kills a worker often kills several.
    """
    max_crashes = MAX_FURTHER_RETRIES if reply_started or worker_exit.is_external else MAX_RETRIES
    if (reply_started and not can_resume) or crashes > max_crashes:
        return False
    return batch_size > 1 or worker_exit.is_external or worker_exit.spares_jobs or worker_exit.is_hung


def describe_exit(code: int) -> tuple[str, int | None]:
    """An exit status in words, and the number of the signal that ended the process."""
    if code >= 0:
        return f"exited with code {code}", None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    return f"killed by {name} (signal {-code})", -code
