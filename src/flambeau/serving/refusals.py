"""Why a model takes no job, in the words that clients match; pure."""

from __future__ import annotations

from flambeau.errors import Unavailable
from flambeau.serving.workers.recovery import Death

REMEDY = (
    "Please use scale workers API to add workers. If this is a sequence inference, please check if it is closed, "
    "or expired; or exceeds maxSequenceJobQueueSize"
)


def refused(model: str, version: str | None, reason: str = "", *, retry_after_s: int | None = None) -> Unavailable:
    """Nobody can take the job; `version` is the one that the client named."""
    # Clients match this text, quotes and all; what follows it is ours.
    named = f'Model "{model}" Version {version}"' if version else f'Model "{model}"'
    text = f"{named} has no worker to serve inference request. {REMEDY}"
    return Unavailable(f"{text}. {reason}" if reason else text, retry_after_s=retry_after_s)


def no_worker(model: str, version: str | None, death: Death | None) -> Unavailable:
    """There is no worker, nor will there be one."""
    return refused(model, version, f"The last worker: {death.reason}" if death else "")


def not_loaded(model: str, death: Death | None) -> Unavailable:
    """The model could not be loaded, and is tried again."""
    reason = death.reason if death else "the model could not be loaded"
    return Unavailable(f'Model "{model}" has no worker yet and is tried again: {reason}', retry_after_s=1)


def queue_full(model: str, version: str | None, capacity: int, *, drained_in_s: float) -> Unavailable:
    """Too many wait already."""
    return refused(
        model,
        version,
        f"All {capacity} places in its queue are taken (jobQueueSize, job_queue_size).",
        retry_after_s=max(1, round(drained_in_s)),
    )
