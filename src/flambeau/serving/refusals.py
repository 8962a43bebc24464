"""Why a model takes no job, in the words that clients match; pure."""

from __future__ import annotations

from flambeau.errors import QueueFull, Unavailable
from flambeau.serving.workers.recovery import Death

REMEDY = (
    "Please use scale workers API to add workers. If this is a sequence inference, please check if it is closed, "
    "or expired; or exceeds maxSequenceJobQueueSize"
)


def refused(model: str, version: str | None, reason: str = "") -> Unavailable:
    """Nobody can take the job; `version` is the one that the client named."""
    return Unavailable(text_of_refusal(model, version, reason))


def text_of_refusal(model: str, version: str | None, reason: str) -> str:
    """What a client that is turned away reads."""
    # Clients match this text, quotes and all; what follows it is ours.
    named = f'Model "{model}" Version {version}"' if version else f'Model "{model}"'
    text = f"{named} has no worker to serve inference request. {REMEDY}"
    return f"{text}. {reason}" if reason else text


def no_worker(model: str, version: str | None, death: Death | None) -> Unavailable:
    """There is no worker, nor will there be one."""
    return refused(model, version, f"The last worker: {death.reason}" if death else "")


def not_loaded(model: str, death: Death | None) -> Unavailable:
    """The model could not be loaded, and is tried again."""
    reason = death.reason if death else "the model could not be loaded"
    return Unavailable(f'Model "{model}" has no worker yet and is tried again: {reason}', retry_after_s=1)


def queue_full(model: str, version: str | None, capacity: int, *, drained_in_s: float) -> QueueFull:
    """Too many wait already."""
    reason = f"All {capacity} places in its queue are taken (jobQueueSize, job_queue_size)."
    return QueueFull(text_of_refusal(model, version, reason), retry_after_s=max(1, round(drained_in_s)))
