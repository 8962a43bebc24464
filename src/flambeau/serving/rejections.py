"""Errors for jobs that a model does not accept, in the words that clients match."""

from __future__ import annotations

from flambeau.errors import QueueFull, Unavailable
from flambeau.serving.crash_recovery import WorkerExit

REMEDY = (
    "Please use scale workers API to add workers. If this is a sequence inference, please check if it is closed, "
    "or expired; or exceeds maxSequenceJobQueueSize"
)


def rejected(model: str, version: str | None, reason: str = "") -> Unavailable:
    """No worker can take the job; `version` is the one that the client named."""
    return Unavailable(rejection_text(model, version, reason))


def rejection_text(model: str, version: str | None, reason: str) -> str:
    # Clients match this text, including the odd quotation mark. Only `reason` is ours.
    named = f'Model "{model}" Version {version}"' if version else f'Model "{model}"'
    text = f"{named} has no worker to serve inference request. {REMEDY}"
    return f"{text}. {reason}" if reason else text


def no_worker(model: str, version: str | None, last_exit: WorkerExit | None) -> Unavailable:
    """There is no worker and none will be started."""
    return rejected(model, version, f"The last worker: {last_exit.reason}" if last_exit else "")


def not_loaded(model: str, last_exit: WorkerExit | None) -> Unavailable:
    """The model could not be loaded; another attempt follows."""
    reason = last_exit.reason if last_exit else "the model could not be loaded"
    return Unavailable(f'Model "{model}" has no worker yet and is tried again: {reason}', retry_after_s=1)


def queue_full(model: str, version: str | None, capacity: int, *, drained_in_s: float) -> QueueFull:
    reason = f"All {capacity} places in its queue are taken (jobQueueSize, job_queue_size)."
    return QueueFull(rejection_text(model, version, reason), retry_after_s=max(1, round(drained_in_s)))
