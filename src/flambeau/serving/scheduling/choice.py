"""How a model's jobs reach its workers: the queue and the dispatcher that its settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flambeau.config.model import ModelConfig
from flambeau.config.server import SequenceHeaders
from flambeau.serving.job import Job
from flambeau.serving.scheduling.batching import BatchLimits
from flambeau.serving.scheduling.dispatch import Dispatcher
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.scheduling.sequence_dispatch import SequenceDispatcher
from flambeau.serving.scheduling.sequences import SequenceLimits, Sequences
from flambeau.serving.workers.devices import count_cores
from flambeau.serving.workers.ranks import keeps_step
from flambeau.serving.workers.remote_worker import RemoteWorker

DEFAULT_SEQUENCE_IDLE_S = 60.0  # where sequenceMaxIdleMSec is missing


def new_dispatcher(
    config: ModelConfig,
    names: SequenceHeaders,
    workers: list[RemoteWorker],
    *,
    min_workers: Callable[[], int],
    refuse: Callable[[Job, str], None],
) -> tuple[JobQueue, Dispatcher | SequenceDispatcher]:
    """The queue and the dispatcher of a model; `refuse` answers jobs whose sequence has ended."""
    limits = limits_of(config)
    if not config.sequence_batching:
        queue = JobQueue(config.queue_size)
        return queue, Dispatcher(queue, workers, limits, count_cores())
    lives = SequenceLimits(
        count=config.max_sequences,
        queue_size=config.sequence_queue_size,
        idle_s=config.sequence_max_idle_s or DEFAULT_SEQUENCE_IDLE_S,
        total_s=config.sequence_timeout_s,
    )
    sequences = Sequences(lives, names, config.queue_size)
    dispatcher = SequenceDispatcher(
        sequences, workers, limits, min_workers=min_workers, needs_ticket=config.use_job_ticket, refuse=refuse
    )
    return sequences, dispatcher


def limits_of(config: ModelConfig) -> BatchLimits:
    """How many jobs leave together: one by one into a batch that goes on, unless ranks must begin it together."""
    joins_one_by_one = config.continuous_batching and not keeps_step(config)
    return BatchLimits(
        size=1 if joins_one_by_one else config.num_together,
        delay_s=config.batch_delay_s if config.schedule in ("batches", "sequences") else None,
        concurrency=config.num_together if config.continuous_batching else config.concurrency,
    )


def contradictions(config: ModelConfig) -> Iterator[str]:
    """What a model's settings ask for and do not get, with what they get instead."""
    if config.async_communication and config.schedule != "async":
        winner = "continuousBatching" if config.continuous_batching else "sequenceBatching"
        yield f"asyncCommunication does not go with {winner}, which is used"
    elif config.async_communication and config.batch_size > 1:
        yield f"asyncCommunication sends requests one by one; batchSize {config.batch_size} is not used"
    if config.continuous_batching and keeps_step(config):
        kind = config.parallel_type
        yield f"continuousBatching with parallelType {kind}: requests join only when the running batch is over"
    if config.sequence_batching and not config.sequence_max_idle_s:
        limit = f"{DEFAULT_SEQUENCE_IDLE_S:g} s"
        yield f"sequenceBatching needs sequenceMaxIdleMSec; without it a sequence ends after {limit} without a request"
