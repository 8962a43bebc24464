"""Who gets the next job."""

from __future__ import annotations

from flambeau.serving.scheduling.batch_dispatcher import BatchDispatcher
from flambeau.serving.scheduling.batch_policy import BatchLimits
from flambeau.serving.scheduling.queue import JobQueue
from support.jobs import new_job, new_worker


def sent_to(*workers, limits, num_jobs):
    """How many jobs each message has brought to each worker."""
    queue = JobQueue(100)
    dispatcher = BatchDispatcher(queue, [*workers], limits, num_cores=4)
    for _ in range(num_jobs):
        queue.put(new_job())
    dispatcher.feed()
    dispatcher.close()
    return [[len(run.jobs) for run in worker._channel.sent] for worker in workers], len(queue)


async def test_worker_that_generates_gets_jobs_one_by_one_at_once_and_no_more_than_it_has_places():
    worker = new_worker(is_concurrent=True, places=3)
    limits = BatchLimits(size=8, delay_s=60.0, concurrency=64)
    assert sent_to(worker, limits=limits, num_jobs=5) == ([[1, 1, 1]], 2)


async def test_two_workers_that_generate_share_the_jobs():
    workers = [new_worker(is_concurrent=True, places=3) for _ in range(2)]
    assert sent_to(*workers, limits=BatchLimits(), num_jobs=5) == ([[1, 1, 1], [1, 1]], 0)
