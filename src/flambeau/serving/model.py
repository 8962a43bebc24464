"""Model: one registered name and version, with its queue, workers and status."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flambeau.archive.manifest import Manifest
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.errors import DeadlinePassed, Unavailable, WorkerDied, WorkersFailed
from flambeau.logs.layouts import printable
from flambeau.logs.writer import Logs
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.job import Job
from flambeau.serving.measures import Measures
from flambeau.serving.scheduling.batching import AHEAD_OF_QUICK
from flambeau.serving.scheduling.choice import contradictions, new_dispatcher
from flambeau.serving.scheduling.crowding import Crowd
from flambeau.serving.scheduling.priorities import NORMAL, priority_of
from flambeau.serving.sources.dependencies import THE_SERVERS_OWN
from flambeau.serving.workers.autoscaling import Limits
from flambeau.serving.workers.devices import count_cores
from flambeau.serving.workers.elasticity import Elasticity
from flambeau.serving.workers.grouping import Grouping
from flambeau.serving.workers.memory import resident_bytes_of
from flambeau.serving.workers.output import WorkerOutput
from flambeau.serving.workers.placement import threads_per_worker
from flambeau.serving.workers.ranks import MeetingPoints
from flambeau.serving.workers.recovery import Death, should_retry
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Slot, Supervisor
from flambeau.serving.workers.worker_process import WorkerSpec, environment_for, worker_name
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
    downloaded: Path | None = None  # the file in the store that goes when the model goes
    problem: str = ""  # why it has no files, where its archive could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What models of one server share: its settings, devices, worker numbers, metrics and logs."""

    config: ServerConfig
    gpus: range
    worker_ids: Iterator[int]
    meeting_points: MeetingPoints
    make_room: Callable[[], bool]
    measures: Measures
    logs: Logs
    probe: Callable[[], Shared | None]
    devices_in_use: Callable[[], Iterator[int | None]]


class Model:
    """One name and version: takes jobs, and keeps the workers that answer them."""

    def __init__(self, name: str, version: str, handler: str, source: Source, config: ModelConfig, host: Host) -> None:
        self.name = name
        self.version = version
        self.handler = handler
        self.source = source
        self._grouping = Grouping(name, config, host.gpus, host.devices_in_use, host.meeting_points)
        self.config = config = self._grouping.config
        self.loaded_at_startup = False
        self.workflow = ""  # the workflow it is a node of
        self.environment = THE_SERVERS_OWN  # what its workers run on
        self.min_workers = config.min_workers
        self.max_workers = max(config.max_workers, int(config.scales_to_zero))
        self.answers: Counter[int] = Counter()
        self.traffic = ModelTraffic(name, host.measures.traffic)
        self._host = host
        self._is_closed = False
        self._num_cores = count_cores()
        self._workers: list[RemoteWorker] = []
        self._watch: asyncio.Task[None] | None = None
        self.queue, self._dispatcher = new_dispatcher(
            config,
            host.config.sequence_headers,
            self._workers,
            min_workers=lambda: self.min_workers,
            refuse=lambda job, reason: job.fail(self._refused(None, reason)),
        )
        self._refusal = self._dispatcher.refusal if config.use_job_ticket or config.sequence_batching else None
        for warning in contradictions(config):
            logger.warning("%s: %s", self, warning)
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
        self.elasticity = Elasticity(str(self), self.supervisor, self._workers, self.queue, host.make_room)

    def __str__(self) -> str:
        return printable(f"{self.name} {self.version}")

    @property
    def is_listed(self) -> bool:
        """Whether it is a model to its users; the functions of workflows are not."""
        return not self.workflow or bool(self.source.url)

    # ---- jobs ----

    def add(self, job: Job, *, requested_version: str | None = None) -> None:
        """Accept a job, or say at once why not."""
        job.usage = self.traffic.requested(requested_version)
        if not self.supervisor.has_ready:
            self._check_hope(requested_version)
        if len(self.queue) + self._most_ahead >= self.queue.capacity and self.num_waiting >= self.queue.capacity:
            raise self._queue_full(requested_version)
        if (priority := priority_of(job.headers)) != NORMAL:
            job.priority = priority
        if self._refusal is not None and (reason := self._refusal(job)):
            raise self._refused(requested_version, reason)
        if self.config.client_timeout_s is not None:
            deadline = job.arrived + self.config.client_timeout_s
            job.expiry = asyncio.get_running_loop().call_at(deadline, self._expire, job)
        self.elasticity.last_arrival = job.arrived
        self._dispatcher.add(job)

    def _check_hope(self, requested_version: str | None) -> None:
        """Where no worker is ready: wake the model if it sleeps; refuse a job that would wait for nothing."""
        self._wake()
        if not self.supervisor.has_hope:
            raise self._no_worker(requested_version)
        if self.supervisor.cannot_load:
            raise self._not_loaded()

    def _wake(self) -> None:
        if self.is_sleeping:
            self._keep_watch()
            self.elasticity.wake(self.limits)

    def _expire(self, job: Job) -> None:
        if not job.is_over:
            assert self.config.client_timeout_s is not None
            waited = f"{self.config.client_timeout_s * 1000:.0f} ms (clientTimeoutInMills)"
            error = DeadlinePassed(f"Model {self.name!r} did not answer within {waited}.")
            receiver = job.receiver
            job.cancel()
            receiver.on_error(error)

    def _refused(self, version: str | None, reason: str = "", *, retry_after_s: int | None = None) -> Unavailable:
        # Clients match this text, quotes and all; what follows it is ours.
        named = f'Model "{self.name}" Version {version}"' if version else f'Model "{self.name}"'
        text = f"{named} has no worker to serve inference request. {REMEDY}"
        return Unavailable(f"{text}. {reason}" if reason else text, retry_after_s=retry_after_s)

    def _no_worker(self, version: str | None) -> Unavailable:
        death = self.supervisor.last_death
        return self._refused(version, f"The last worker: {death.reason}" if death else "")

    def _not_loaded(self) -> Unavailable:
        death = self.supervisor.last_death
        reason = death.reason if death else "the model could not be loaded"
        return Unavailable(f'Model "{self.name}" has no worker yet and is tried again: {reason}', retry_after_s=1)

    def _queue_full(self, version: str | None) -> Unavailable:
        return self._refused(
            version,
            f"All {self.queue.capacity} places in its queue are taken (jobQueueSize, job_queue_size).",
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
        self.min_workers, self.max_workers = self._grouping.at_most(minimum), self._grouping.at_most(maximum)
        fresh = self.supervisor.scale(self.min_workers, self.max_workers)
        self._keep_watch()
        self._on_change()
        if wait:
            await self.supervisor.wait_started(fresh)

    @property
    def limits(self) -> Limits:
        """Between which numbers of workers the model moves by itself."""
        config = self.config
        if config.sequence_batching or self._is_closed:  # a sequence needs the worker that holds its state
            return Limits(minimum=self.min_workers, maximum=self.min_workers)
        return Limits(
            minimum=self.min_workers,
            maximum=self.max_workers,
            target_queue_s=config.target_queue_s,
            idle_s=config.idle_s,
            scales_to_zero=config.scales_to_zero,
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether it has no worker now, and gets one when it is asked for."""
        return not self.supervisor.slots and self.limits.allow_sleep

    @property
    def can_answer(self) -> bool:
        """Whether it has a worker that is ready, or gets one on demand."""
        return self.supervisor.has_ready or self.is_sleeping

    @property
    def num_wanted(self) -> int:
        """How many workers it should have now."""
        return 0 if self.is_sleeping else max(self.min_workers, self.supervisor.num_present)

    @property
    def state(self) -> str:
        """How it is, in one word."""
        if self.is_sleeping:
            return "sleeping"
        if self.supervisor.has_ready:
            return "ready"
        return "loading" if self.supervisor.has_hope else "failed" if self.supervisor.slots else "without workers"

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
        if self.limits.allow_sleep:
            return self.is_sleeping or self.supervisor.has_hope
        return self.supervisor.num_present >= self.min_workers

    @property
    def is_ready(self) -> bool:
        """Whether as many workers as wanted have the model loaded; one that sleeps or wakes has shown that it can."""
        supervisor = self.supervisor
        if self.limits.allow_sleep and supervisor.load_s is not None:
            return self.is_sleeping or (supervisor.has_hope and not supervisor.cannot_load)
        return supervisor.num_ready >= self.min_workers > 0

    async def close(self, reason: str, *, now: bool = False) -> None:
        """Refuse what waits, finish what runs, stop the workers."""
        self._is_closed = True
        self._refuse_all(Unavailable(reason))
        if self._watch is not None:
            self._watch.cancel()
        await self.supervisor.close(now=now)
        self._refuse_all(Unavailable(reason))  # what a worker that had to be killed gave back
        self._dispatcher.close()

    def _keep_watch(self) -> None:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._look_after())

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for worker in self._workers:
                self._check(worker)
            self._look_at_crowd()
            self._dispatcher.look_after()
            try:
                self.elasticity.look(self.limits)
            except Exception:  # a mistake in scaling must not end the watch over stalled workers
                logger.exception("%s could not be scaled", self)

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
            worker.blame_silent(timeout)
            logger.error("Number or consecutive unsuccessful inference %d", self._failures_of(worker))
            worker.kill(Death(reason=f"no answer within responseTimeout, {timeout:g} s"))
        elif limit_mb is not None and (used := resident_bytes_of(worker.pids)) > limit_mb << 20:
            reason = f"it used {used >> 20} MB of memory; workerMemoryLimitMb is {limit_mb}"
            worker.kill(Death(reason=reason, out_of_memory=True))

    def _failures_of(self, worker: RemoteWorker) -> int:
        if worker.has_answered:
            return 1
        return 1 + sum(slot.failures for slot in self.supervisor.slots if slot.worker is worker)

    def _new_slot(self) -> Slot:
        number = self._grouping.take_id() or next(self._host.worker_ids)
        return Slot(number, self._grouping.place(), worker_name(number, self.name, self.version))

    def _new_worker(self, slot: Slot) -> RemoteWorker:
        server, measures = self._host.config, self._host.measures
        load = Load(
            model=self.name,
            version=self.version,
            folder=str(self.source.folder),
            handler=self.handler,
            batch_size=1 if self.config.schedule == "async" else self.config.batch_size,
            gpu_id=self._grouping.gpu_id(slot.devices),
            decode_input=server.decode_input_request,
            limit_max_image_pixels=server.limit_max_image_pixels,
            max_response_bytes=server.max_response_bytes,
            probe=self._host.probe(),
            envelope=self.envelope,
            watch=server.watch and not self.source.is_temporary,
            schedule=self.config.schedule,
            metrics_file=str(measures.file),
            metrics=[(one.name, one.kind, one.unit, [*one.dimensions]) for one in measures.model_definitions],
        )
        is_pipelined = bool(self.config.options.get("pipeline")) and slot.device is None
        threads = threads_per_worker(self._num_cores, self.max_workers, is_pipelined=is_pipelined)
        spec = WorkerSpec(
            id=slot.id,
            load=load,
            environment=self.environment.extend(
                environment_for(
                    load, threads=threads, hidden=server.hidden_env, sequence_headers=server.sequence_headers
                )
            ),
            python=self.environment.python,
            max_frame_bytes=server.max_response_bytes * max(1, self.config.num_together),
            transport=server.worker_transport,
        )
        spec = self._grouping.apply(spec, slot.devices)
        return RemoteWorker(
            spec,
            on_free=self._dispatcher.feed,
            on_lost=self._on_lost,
            on_samples=self._on_samples,
            traffic=self.traffic,
            output=WorkerOutput(self._host.logs, spec.name, measures.add_samples),
        )

    def _on_lost(self, death: Death, suspects: list[tuple[Job, int]], innocent: list[Job]) -> None:
        """A worker died: its jobs are tried again or answered, at once."""
        for job in reversed(innocent):
            self.queue.put_back(job)
        for job, batch_size in reversed(suspects):
            job.crashes += 1
            if not self.config.sequence_batching and should_retry(
                death, batch_size=batch_size, crashes=job.crashes, reply_started=job.started
            ):
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
        if self.queue:  # what a worker gave back on its way to bed
            self._wake()
        if not self.supervisor.has_hope:
            self._refuse_all(self._no_worker(None))
        elif self.supervisor.cannot_load:  # waiting for the next try would be waiting for the same
            self._refuse_all(self._not_loaded())

    def _on_samples(self, message: Samples) -> None:
        self._host.measures.add_samples(message.samples)
