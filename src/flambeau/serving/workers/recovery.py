"""What happens after a worker died: who is retried, and when the worker comes back; pure decisions."""

from __future__ import annotations

import signal
from dataclasses import dataclass

# TorchServe's rhythm (1, 1, 2, 3, 5 … s), so that existing crash alerts keep their meaning;
# only the first restart comes at once.
_DELAYS_S = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RETRIES = 1  # how many deaths a job survives …
RESUMES = 3  # … and how many where its reply has begun and can go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a worker ended, in words and numbers."""

    reason: str
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    by_server: bool = False  # we ended it, for a reason
    spares_jobs: bool = False  # … that has nothing to do with its jobs
    is_told: bool = False  # the model log has the traceback already
    while_loading: bool = False  # the model itself could not be loaded
    is_final: bool = False  # … nor could it be by another try
    last_lines: tuple[str, ...] = ()

    @property
    def is_from_outside(self) -> bool:
        """Whether neither the worker itself nor this server ended it."""
        return self.signal in FROM_OUTSIDE and not self.by_server and not self.out_of_memory

    @property
    def cause(self) -> str:
        """The reason, followed by the worker's last words."""
        return "\n".join([self.reason, *(f"  | {line}" for line in self.last_lines)])


def backoff_s(failures: int) -> float:
    """How long to wait before the restart that follows this many failures in a row."""
    return _DELAYS_S[min(failures, len(_DELAYS_S)) - 1]


def is_hopeless(failures: int, waited_s: float, max_retry_s: float) -> bool:
    """Whether the next try would lie beyond the time that a worker is tried again for.

    Only the waiting between tries counts: a model that takes long to load is not given up sooner for it.
    """
    return waited_s + backoff_s(failures) > max_retry_s


def should_retry(death: Death, *, batch_size: int, crashes: int, reply_started: bool, can_go_on: bool = False) -> bool:
    """Whether a job held by a dead worker gets another try; one whose reply has begun, only where it can go on.

    A job that was alone when its worker ended by its own doing is the culprit. One that was in a batch,
    or whose worker was killed from outside, may be innocent, once.
    """
    if (reply_started and not can_go_on) or crashes > (RESUMES if reply_started else RETRIES):
        return False
    if death.spares_jobs:
        return True
    return batch_size > 1 or death.is_from_outside


def describe_exit(code: int) -> tuple[str, int | None]:
    """An exit status in words, and the signal number if one ended the process."""
    if code >= 0:
        return f"exited with code {code}", None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    return f"killed by {name} (signal {-code})", -code
