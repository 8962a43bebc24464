"""The queue and the dispatcher that a model's settings select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flambeau.config.model import ModelConfig
from flambeau.config.server import SequenceHeaders
from flambeau.serving.job import Job
from flambeau.serving.response_cache import UNCACHED
from flambeau.serving.scheduling.batch_dispatcher import BatchDispatcher
from flambeau.serving.scheduling.batch_policy import BatchLimits
from flambeau.serving.scheduling.dispatcher import Dispatcher, Worker
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.serving.scheduling.session_dispatcher import SessionDispatcher
from flambeau.serving.scheduling.sessions import SessionLimits, Sessions
from flambeau.serving.workers.host_resources import count_cores
from flambeau.serving.workers.ranks import keeps_step

DEFAULT_SESSION_IDLE_S = 60.0  # without sequenceMaxIdleMSec


def new_dispatcher(
    config: ModelConfig,
    headers: SequenceHeaders,
    workers: Sequence[Worker],
    *,
    min_workers: Callable[[], int],
    reject: Callable[[Job, str], None],
) -> tuple[JobQueue, Dispatcher]:
    """The queue and the dispatcher of a model. `reject` answers queued jobs whose session has ended."""
    limits = batch_limits(config)
    if not config.sequence_batching:
        queue = JobQueue(config.queue_size)
        dispatcher = BatchDispatcher(
            queue, workers, limits, num_cores=count_cores(), needs_ticket=config.use_job_ticket
        )
        return queue, dispatcher
    session_limits = SessionLimits(
        count=config.max_sequences,
        queue_size=config.sequence_queue_size,
        idle_s=config.sequence_max_idle_s or DEFAULT_SESSION_IDLE_S,
        total_s=config.sequence_timeout_s,
    )
    sessions = Sessions(session_limits, headers, config.queue_size)
    return sessions, SessionDispatcher(
        sessions, workers, limits, min_workers=min_workers, needs_ticket=config.use_job_ticket, reject=reject
    )


def batch_limits(config: ModelConfig) -> BatchLimits:
    """How many jobs leave together. Jobs join a continuous batch one by one, unless its ranks run in lockstep."""
    joins_one_by_one = config.continuous_batching and not keeps_step(config)
    size = 1 if joins_one_by_one else config.num_together
    return BatchLimits(
        size=size,
        delay_s=config.batch_delay_s if size > 1 and config.schedule in ("batches", "sequences") else None,
        concurrency=config.num_together if config.continuous_batching else config.concurrency,
    )


def contradictions(config: ModelConfig) -> Iterator[str]:
    """Settings of a model that have no effect together, each with what happens instead."""
    if config.async_communication and config.schedule != "async":
        winner = "continuousBatching" if config.continuous_batching else "sequenceBatching"
        yield f"asyncCommunication does not go with {winner}, which is used"
    elif config.async_communication and config.batch_size > 1:
        yield f"asyncCommunication sends requests one by one; batchSize {config.batch_size} is not used"
    if config.continuous_batching and keeps_step(config):
        kind = config.parallel_type
        yield f"continuousBatching with parallelType {kind}: requests join only when the running batch is over"
    if config.response_cache_mb and config.schedule in UNCACHED:
        switch = "continuousBatching" if config.continuous_batching else "sequenceBatching"
        yield f"responseCacheMb does not go with {switch}: no replies are kept"
    elif config.response_cache_mb and not config.response_cache_s:
        yield "responseCacheMb has no effect with responseCacheInSec: 0"
    elif config.response_cache_mb == 0 and config.response_cache_headers is not None:
        yield "responseCacheHeaders has no effect without responseCacheMb"
    if config.sequence_batching and (config.renew_after or config.renew_above_mb):
        yield "renewAfterRequests and renewAboveMb do not go with sequenceBatching: sequences would end with a worker"
    if config.sequence_batching and not config.sequence_max_idle_s:
        limit = f"{DEFAULT_SESSION_IDLE_S:g} s"
        yield f"sequenceBatching needs sequenceMaxIdleMSec; without it a sequence ends after {limit} without a request"
