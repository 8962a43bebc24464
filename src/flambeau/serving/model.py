"""Model: one registered name and version, with its queue, workers and status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from flambeau.config.model import ModelConfig
from flambeau.errors import DeadlinePassed, Unavailable, WorkerDied, WorkersFailed
from flambeau.logs.layouts import printable
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.job import Job
from flambeau.serving.refusals import no_worker, not_loaded, queue_full, refused
from flambeau.serving.scheduling.choice import contradictions, new_dispatcher
from flambeau.serving.sources.dependencies import PythonEnvironment
from flambeau.serving.sources.source import Source
from flambeau.serving.workers.autoscaling import Limits
from flambeau.serving.workers.elasticity import Elasticity
from flambeau.serving.workers.making import Host, WorkerMaker
from flambeau.serving.workers.recovery import Death, should_retry
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Slot, Supervisor
from flambeau.serving.workers.watch import Watch

logger = logging.getLogger(__name__)


class Model:
    """One name and version: takes jobs, and keeps the workers that answer them."""

    def __init__(self, name: str, version: str, handler: str, source: Source, config: ModelConfig, host: Host) -> None:
        self.name = name
        self.version = version
        self.handler = handler
        self.source = source
        self._maker = WorkerMaker(name, version, handler, source, config, host)
        self.config = config = self._maker.config
        self.registered_at = time.time()
        self.loaded_at_startup = False
        self.workflow = ""  # the workflow it is a node of
        self.min_workers = config.min_workers
        self.max_workers = max(config.max_workers, int(config.scales_to_zero))
        self.answers: Counter[int] = Counter()
        self.abilities: frozenset[str] = frozenset()  # what front ends may ask for beside predictions
        self.max_length = 0  # of what it generates, with the prompt; 0: not known
        self.traffic = ModelTraffic(name, host.telemetry.traffic)
        self._is_closed = False
        self._is_told = False  # that it has loaded
        self._workers: list[RemoteWorker] = []
        self.queue, self._dispatcher = new_dispatcher(
            config,
            host.config.sequence_headers,
            self._workers,
            min_workers=lambda: self.min_workers,
            refuse=lambda job, reason: job.fail(refused(name, None, reason)),
        )
        self._refusal = self._dispatcher.refusal if config.use_job_ticket or config.sequence_batching else None
        for warning in contradictions(config):
            logger.warning("%s: %s", self, warning)
        self.supervisor = Supervisor(
            name=f"model {name} version: {version}",
            new_worker=self._new_worker,
            new_slot=self._maker.new_slot,
            workers=self._workers,
            startup_timeout_s=config.startup_timeout_s,
            max_retry_s=config.max_retry_s,
            drain_timeout_s=host.config.drain_timeout_s,
            on_change=self._on_change,
        )
        self.elasticity = Elasticity(str(self), self.supervisor, self._workers, self.queue, host.make_room)
        looks = (self._dispatcher.look_after, lambda: self.elasticity.look(self.limits))
        self._watch = Watch(str(self), config, self.supervisor, self._workers, looks)

    def run_on(self, environment: PythonEnvironment) -> None:
        """What its workers run on from now on, instead of what the server itself does."""
        self._maker.environment = environment

    def __str__(self) -> str:
        return printable(f"{self.name} {self.version}")

    @property
    def is_listed(self) -> bool:
        """Whether it is a model to its users; the functions of workflows are not."""
        return not self.workflow or bool(self.source.url)

    # ---- jobs ----

    def add(self, job: Job, *, requested_version: str | None = None) -> None:
        """Accept a job, or say at once why not."""
        if job.kind != "describe":  # a question of the management API is no inference
            job.usage = self.traffic.requested(requested_version)
        if not self.supervisor.has_ready:
            self._check_hope(requested_version)
        if len(self.queue) + self.traffic.num_ahead >= self.queue.capacity:
            raise queue_full(self.name, requested_version, self.queue.capacity, drained_in_s=self._seconds_to_drain())
        if self._refusal is not None and (reason := self._refusal(job)):
            raise refused(self.name, requested_version, reason)
        if self.config.client_timeout_s is not None:
            deadline = job.arrived + self.config.client_timeout_s
            job.expiry = asyncio.get_running_loop().call_at(deadline, self._expire, job)
        self.elasticity.last_arrival = job.arrived
        self._dispatcher.add(job)

    def _check_hope(self, requested_version: str | None) -> None:
        """Where no worker is ready: wake the model if it sleeps; refuse a job that would wait for nothing."""
        if self.limits.allow_sleep and not self.supervisor.has_hope:
            self.supervisor.drop_given_up()  # as if it slept: to be asked for is a reason to try again
        self._wake()
        if not self.supervisor.has_hope:
            raise no_worker(self.name, requested_version, self.supervisor.last_death)
        if self.supervisor.cannot_load:
            raise not_loaded(self.name, self.supervisor.last_death)

    def _wake(self) -> None:
        if self.is_sleeping:
            self._watch.start()
            self.elasticity.wake(self.limits)

    def _expire(self, job: Job) -> None:
        assert self.config.client_timeout_s is not None
        waited = f"{self.config.client_timeout_s * 1000:.0f} ms (clientTimeoutInMills)"
        job.expire(DeadlinePassed(f"Model {self.name!r} did not answer within {waited}."))

    def _seconds_to_drain(self) -> float:
        """How long the queue would take at the present pace."""
        times = [worker.service_s / max(1, worker.places) for worker in self._workers if worker.service_s]
        batches = len(self.queue) / self.config.batch_size
        return batches * sum(times) / len(times) ** 2 if times else 1.0

    # ---- workers ----

    async def scale(self, minimum: int, maximum: int, *, wait: bool) -> None:
        """Change the number of workers; with `wait`, return when they have started or raise."""
        self._check_open()
        if minimum > 0 and self.config.response_timeout_s <= 0:
            cause = "the response timeout is 0 seconds, in which no worker can answer"
            raise WorkersFailed(f"Failed to start workers for {self.supervisor.name}", cause=cause)
        self.min_workers, self.max_workers = self._maker.at_most(minimum), self._maker.at_most(maximum)
        fresh = self.supervisor.scale(self.min_workers, self.max_workers)
        self._watch.start()
        self._on_change()
        if wait:
            await self.supervisor.wait_started(fresh)
            self._check_open()  # it may have been unregistered meanwhile

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f'Model "{self.name}" has been unregistered.')

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
    def has_loaded(self) -> bool:
        """Whether a worker has had it, now or before: only then are its abilities known."""
        return self.supervisor.load_s is not None

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
        return len(self.queue) + self.traffic.num_ahead

    @property
    def num_in_flight(self) -> int:
        """Jobs accepted and not yet answered."""
        return len(self.queue) + sum(batch.remaining for worker in self._workers for batch in worker.batches)

    @property
    def envelope(self) -> str:
        """What is around the handler: what the model names, else what the server does."""
        return self._maker.envelope

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
        self._watch.stop()
        await self.supervisor.close(now=now)
        self._refuse_all(Unavailable(reason))  # what a worker that had to be killed gave back
        self._dispatcher.close()

    def _new_worker(self, slot: Slot) -> RemoteWorker:
        return self._maker.new_worker(
            slot,
            num_workers=self.max_workers,
            on_free=self._dispatcher.feed,
            on_lost=self._on_lost,
            traffic=self.traffic,
        )

    def _on_lost(self, death: Death, suspects: list[tuple[Job, int]], innocent: list[Job]) -> None:
        """A worker died: its jobs are tried again or answered, at once."""
        for job in reversed(innocent):
            self.queue.put_back(job)
        for job, batch_size in reversed(suspects):
            job.crashes += 1
            if not self.config.sequence_batching and should_retry(
                death,
                batch_size=batch_size,
                crashes=job.crashes,
                reply_started=job.started,
                can_go_on=job.can_go_on,
            ):
                job.is_alone = True
                # Generations are long, so those whose worker was killed from outside go on together.
                job.is_suspect = not ("generate" in self.abilities and death.is_from_outside)
                self.queue.put_back(job)
            else:
                job.fail(WorkerDied(cause=death.cause, out_of_memory=death.out_of_memory))
        self._on_change()
        self._dispatcher.on_lost()

    def tell_loaded(self) -> None:
        """Say once that it is there: with a worker, or registered without one where none is wanted."""
        if not self._is_told:
            self._is_told = True
            logger.info("Model %s loaded.", printable(self.name))  # TorchServe's words, which scripts wait for

    def _refuse_all(self, error: Unavailable) -> None:
        for job in self.queue.take_all():
            job.fail(error)

    def _on_change(self) -> None:
        for worker in self._workers:
            if worker.is_ready:
                self.abilities, self.max_length = frozenset(worker.abilities), worker.max_length
                self.tell_loaded()
        if self.queue:  # what a worker gave back on its way to bed
            self._wake()
        if not self.supervisor.has_hope:
            self._refuse_all(no_worker(self.name, None, self.supervisor.last_death))
        elif self.supervisor.cannot_load:  # waiting for the next try would be waiting for the same
            self._refuse_all(not_loaded(self.name, self.supervisor.last_death))
