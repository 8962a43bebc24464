"""Model: one registered name and version, with its queue, workers and status."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flambeau.archive.manifest import Manifest
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.errors import DeadlinePassed, Unavailable, WorkerDied, WorkersFailed
from flambeau.metrics.registry import Metrics
from flambeau.serving.batching import AHEAD_OF_QUICK, BatchLimits
from flambeau.serving.crowding import Crowd
from flambeau.serving.devices import count_cores
from flambeau.serving.dispatch import Dispatcher
from flambeau.serving.job import Job
from flambeau.serving.placement import next_device, threads_per_worker
from flambeau.serving.queue import JobQueue
from flambeau.serving.recovery import Death, should_retry
from flambeau.serving.remote_worker import RemoteWorker
from flambeau.serving.supervisor import Slot, Supervisor
from flambeau.serving.worker_process import WorkerSpec, environment_for
from flambeau.wire.messages import Load, Samples, Shared

logger = logging.getLogger(__name__)

REMEDY = (
    "Please use scale workers API to add workers. If this is a sequence inference, please check if it is closed, "
    "or expired; or exceeds maxSequenceJobQueueSize"
)
CHECK_S = 0.1  # how often stalled workers are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model came from and where its files lie."""

    url: str
    folder: Path
    manifest: Manifest | None
    is_temporary: bool = False  # unpacked by us, so ours to delete


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What models of one server share: its settings, devices, worker numbers and metrics."""

    config: ServerConfig
    gpus: range
    worker_ids: Iterator[int]
    metrics: Metrics
    probe: Callable[[], Shared | None]
    devices_in_use: Callable[[], Iterator[int | None]]


class Model:
    """One name and version: takes jobs, and keeps the workers that answer them."""

    def __init__(self, name: str, version: str, handler: str, source: Source, config: ModelConfig, host: Host) -> None:
        self.name = name
        self.version = version
        self.handler = handler
        self.source = source
        self.config = config
        self.loaded_at_startup = False
        self.queue = JobQueue(config.queue_size)
        self.min_workers = config.min_workers
        self.max_workers = config.max_workers
        self.answers: Counter[int] = Counter()
        self._host = host
        self._num_cores = count_cores()
        self._workers: list[RemoteWorker] = []
        self._watch: asyncio.Task[None] | None = None
        limits = BatchLimits(size=config.batch_size, delay_s=config.batch_delay_s)
        self._dispatcher = Dispatcher(self.queue, self._workers, limits, config.concurrency)
        self.supervisor = Supervisor(
            name=f"model {name} version: {version}",
            new_worker=self._new_worker,
            new_slot=self._new_slot,
            workers=self._workers,
            startup_timeout_s=config.startup_timeout_s,
            max_retry_s=config.max_retry_s,
            drain_timeout_s=host.config.drain_timeout_s,
            on_change=self._on_change,
        )

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    # ---- jobs ----

    def add(self, job: Job, *, requested_version: str | None = None) -> None:
        """Accept a job, or say at once why not."""
        if not self.supervisor.has_ready:
            self._check_hope(requested_version)
        if len(self.queue) + self._most_ahead >= self.queue.capacity and self.num_waiting >= self.queue.capacity:
            raise self._queue_full(requested_version)
        if self.config.client_timeout_s is not None:
            deadline = job.arrived + self.config.client_timeout_s
            job.expiry = asyncio.get_running_loop().call_at(deadline, self._expire, job)
        self._dispatcher.add(job)

    def _check_hope(self, requested_version: str | None) -> None:
        """Where no worker is ready: refuse a job that would wait for nothing."""
        if not self.supervisor.has_hope:
            raise self._no_worker(requested_version)
        if self.supervisor.cannot_load:
            raise self._not_loaded()

    def _expire(self, job: Job) -> None:
        if not job.is_over:
            assert self.config.client_timeout_s is not None
            waited = f"{self.config.client_timeout_s * 1000:.0f} ms (clientTimeoutInMills)"
            error = DeadlinePassed(f"Model {self.name!r} did not answer within {waited}.")
            receiver = job.receiver
            job.cancel()
            receiver.on_error(error)

    def _no_worker(self, version: str | None) -> Unavailable:
        # Clients match this text, quotes and all; what follows it is ours.
        named = f'Model "{self.name}" Version {version}"' if version else f'Model "{self.name}"'
        text = f"{named} has no worker to serve inference request. {REMEDY}"
        death = self.supervisor.last_death
        return Unavailable(f"{text}. The last worker: {death.reason}" if death else text)

    def _not_loaded(self) -> Unavailable:
        death = self.supervisor.last_death
        reason = death.reason if death else "the model could not be loaded"
        return Unavailable(f'Model "{self.name}" has no worker yet and is tried again: {reason}', retry_after_s=1)

    def _queue_full(self, version: str | None) -> Unavailable:
        text = str(self._no_worker(version)).partition(". The last worker")[0]
        return Unavailable(
            f"{text}. All {self.queue.capacity} places in its queue are taken (jobQueueSize, job_queue_size).",
            retry_after_s=max(1, round(self._seconds_to_drain())),
        )

    def _seconds_to_drain(self) -> float:
        """How long the queue would take at the present pace."""
        times = [worker.service_s for worker in self._workers if worker.service_s]
        batches = len(self.queue) / self.config.batch_size
        return batches * sum(times) / len(times) ** 2 if times else 1.0

    # ---- workers ----

    async def scale(self, minimum: int, maximum: int, *, wait: bool) -> None:
        """Change the number of workers; with `wait`, return when they have started or raise."""
        if minimum > 0 and self.config.response_timeout_s <= 0:
            cause = "the response timeout is 0 seconds, in which no worker can answer"
            raise WorkersFailed(f"Failed to start workers for {self.supervisor.name}", cause=cause)
        self.min_workers, self.max_workers = minimum, maximum
        fresh = self.supervisor.scale(minimum, maximum)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._look_after())
        self._on_change()
        if wait:
            await self.supervisor.wait_started(fresh)

    @property
    def num_waiting(self) -> int:
        """Jobs no worker has begun: those in the queue, and those sent ahead."""
        ahead = (
            batch for worker in self._workers if not worker.is_concurrent for batch in [*worker.batches][worker.depth :]
        )
        return len(self.queue) + sum(batch.remaining for batch in ahead)

    @property
    def _most_ahead(self) -> int:
        return AHEAD_OF_QUICK * self.config.batch_size * len(self._workers)

    @property
    def num_in_flight(self) -> int:
        """Jobs accepted and not yet answered."""
        return len(self.queue) + sum(batch.remaining for worker in self._workers for batch in worker.batches)

    @property
    def envelope(self) -> str:
        """What is around the handler: what the model names, else what the server does."""
        return self._host.config.service_envelope if self.config.envelope is None else self.config.envelope

    @property
    def is_healthy(self) -> bool:
        """TorchServe's notion: enough workers run, load, or are being tried again."""
        return sum(not slot.has_given_up for slot in self.supervisor.slots) >= self.min_workers

    @property
    def is_ready(self) -> bool:
        """Whether as many workers as wanted have the model loaded."""
        return self.supervisor.num_ready >= self.min_workers > 0

    async def close(self, reason: str, *, now: bool = False) -> None:
        """Refuse what waits, finish what runs, stop the workers."""
        self._refuse_all(Unavailable(reason))
        if self._watch is not None:
            self._watch.cancel()
        await self.supervisor.close(now=now)
        self._refuse_all(Unavailable(reason))  # what a worker that had to be killed gave back
        self._dispatcher.close()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for worker in self._workers:
                self._check(worker)
            self._look_at_crowd()
            if len(self._workers) > 1:
                self._dispatcher.rebalance()

    def _look_at_crowd(self) -> None:
        if len(self._workers) <= self._num_cores:
            self._dispatcher.crowd = None
            return
        crowd = self._dispatcher.crowd = self._dispatcher.crowd or Crowd(self._num_cores)
        crowd.look(self._workers)
        self._dispatcher.feed()

    def _check(self, worker: RemoteWorker) -> None:
        timeout, limit_mb = self.config.response_timeout_s, self.config.memory_limit_mb
        if worker.seconds_without_progress() > timeout:
            logger.error("Backend worker did not respond in given time: worker %d of %s", worker.spec.id, self)
            worker.kill(Death(reason=f"no answer within responseTimeout, {timeout:g} s"))
        elif limit_mb is not None and (used := resident_bytes(worker.pid)) > limit_mb << 20:
            reason = f"it used {used >> 20} MB of memory; workerMemoryLimitMb is {limit_mb}"
            worker.kill(Death(reason=reason, out_of_memory=True))

    def _new_slot(self) -> Slot:
        return Slot(next(self._host.worker_ids), self._place())

    def _place(self) -> int | None:
        if self.config.device_type == "cpu" or not self._host.gpus:
            return None
        valid = all(device in self._host.gpus for device in self.config.device_ids)
        candidates = self.config.device_ids if self.config.device_ids and valid else self._host.gpus
        return next_device(candidates, self._host.devices_in_use())

    def _new_worker(self, slot: Slot) -> RemoteWorker:
        server = self._host.config
        load = Load(
            model=self.name,
            version=self.version,
            folder=str(self.source.folder),
            handler=self.handler,
            batch_size=self.config.batch_size,
            gpu_id=slot.device,
            decode_input=server.decode_input_request,
            limit_max_image_pixels=server.limit_max_image_pixels,
            max_response_bytes=server.max_response_bytes,
            probe=self._host.probe(),
            envelope=self.envelope,
            watch=server.watch and not self.source.is_temporary,
        )
        is_pipelined = bool(self.config.options.get("pipeline")) and slot.device is None
        threads = threads_per_worker(self._num_cores, self.max_workers, is_pipelined=is_pipelined)
        spec = WorkerSpec(
            id=slot.id,
            load=load,
            environment=environment_for(load, threads=threads, hidden=server.hidden_env),
            max_frame_bytes=server.max_response_bytes * max(1, self.config.batch_size),
            transport=server.worker_transport,
        )
        return RemoteWorker(spec, on_free=self._dispatcher.feed, on_lost=self._on_lost, on_samples=self._on_samples)

    def _on_lost(self, death: Death, suspects: list[tuple[Job, int]], innocent: list[Job]) -> None:
        """A worker died: its jobs are tried again or answered, at once."""
        for job in reversed(innocent):
            self.queue.put_back(job)
        for job, batch_size in reversed(suspects):
            job.crashes += 1
            if should_retry(death, batch_size=batch_size, crashes=job.crashes, reply_started=job.started):
                job.is_alone = True
                self.queue.put_back(job)
            else:
                job.fail(WorkerDied(cause=death.cause, out_of_memory=death.out_of_memory))
        self._on_change()
        self._dispatcher.feed()

    def _refuse_all(self, error: Unavailable) -> None:
        for job in self.queue.take_all():
            job.fail(error)

    def _on_change(self) -> None:
        if not self.supervisor.has_hope:
            self._refuse_all(self._no_worker(None))
        elif self.supervisor.cannot_load:  # waiting for the next try would be waiting for the same
            self._refuse_all(self._not_loaded())

    def _on_samples(self, message: Samples) -> None:
        self._host.metrics.add_samples(message.samples)


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 when it cannot be told."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
