"""Model: one registered name and version, with its queue and workers; the errors of jobs it does not accept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from flambeau.config.model import ModelConfig
from flambeau.errors import (
    BadRequest,
    DeadlinePassed,
    FlambeauError,
    ModelRemoved,
    QueueFull,
    Unavailable,
    WorkerDied,
    WorkersFailed,
)
from flambeau.logs.line_formats import masked, printable
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.adapters import AdapterTable
from flambeau.serving.crash_bundles import CrashReport, read_requests
from flambeau.serving.crash_recovery import WorkerExit, is_same_failure, should_retry
from flambeau.serving.dispatcher_factory import contradictions, new_dispatcher
from flambeau.serving.error_limit import FAILED_FROM, ErrorLimit
from flambeau.serving.job import TIMEOUT_HEADER, Job
from flambeau.serving.mirror import Mirror
from flambeau.serving.model_sources.dependencies import PythonEnvironment
from flambeau.serving.model_sources.store import Source
from flambeau.serving.quarantine import Quarantine
from flambeau.serving.response_cache import response_cache
from flambeau.serving.slow_requests import SlowRequests
from flambeau.serving.traffic_split import TrafficSplit
from flambeau.serving.workers.hang_detector import HangDetector
from flambeau.serving.workers.health import StepTimes
from flambeau.serving.workers.host_resources import available_bytes, free_swap_bytes
from flambeau.serving.workers.pool import WorkerPool
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.renewal import RenewalCheck
from flambeau.serving.workers.scaler import Scaler
from flambeau.serving.workers.supervisor import Slot
from flambeau.serving.workers.watchdog import FAMILIES_INTERVAL_S, LivenessCheck, Watchdog
from flambeau.serving.workers.worker_factory import Host, WorkerFactory
from flambeau.wire.messages import TensorSpec

logger = logging.getLogger(__name__)
REMEDY = (
    "Please use scale workers API to add workers. If this is a sequence inference, please check if it is closed, "
    "or expired; or exceeds maxSequenceJobQueueSize"
)


class Model:
    """One name and version: accepts jobs and has the workers that answer them."""

    def __init__(self, name: str, version: str, handler: str, source: Source, config: ModelConfig, host: Host) -> None:
        self.name = name
        self.version = version
        self.handler = handler
        self.source = source
        self._factory = WorkerFactory(name, version, handler, source, config, host)
        self.config = config = self._factory.config
        self.registered_at = time.time()
        self.loaded_at_startup = False
        self.workflow = ""  # the workflow it is a node of
        self.answers: Counter[int] = Counter()  # by status
        self.num_broken = 0  # answers that have begun and were broken off by an error of the server
        self.split: TrafficSplit[Model] | None = None  # of the requests that name no version; None: all to the default
        self.error_limit: ErrorLimit | None = None  # beyond which it gets no more of them
        self.rolled_back = ""  # why it gets none any more
        self.mirror = Mirror(partial(self.add, requested_version=version), self._has_room_for_copies)
        self.abilities: frozenset[str] = frozenset()  # what front ends may ask for besides predictions
        self.quarantine = Quarantine(name, config.quarantine_after) if config.quarantine_after else None
        self.responses = response_cache(config, self._compute, watch=host.config.watch)
        self.adapters = AdapterTable(config.options)  # which adapters requests may name
        self.example = ""  # a request body that the handler accepts, if a worker has reported one
        self.inputs: Sequence[TensorSpec] = ()  # as its handler declares them
        self.outputs: Sequence[TensorSpec] = ()
        self.max_length = 0  # tokens of prompt and reply together; 0: not known
        self.step_times = StepTimes()
        self.traffic = ModelTraffic(name, host.telemetry.traffic)
        self.slow = SlowRequests()
        self._events = host.events
        self._crash_bundles = host.crash_bundles
        self._server_config = host.config
        self._max_workers = host.config.max_workers_per_model
        self._check_number(config.min_workers, config.max_workers)
        self._is_reported = False  # as loaded
        self.pool = WorkerPool(
            f"model {name} version: {version}",
            config,
            new_worker=self._new_worker,
            new_slot=self._new_slot,
            on_change=self._on_change,
            events=host.events,
            drain_timeout_s=host.config.drain_timeout_s,
        )
        self.queue, self._dispatcher = new_dispatcher(
            config,
            host.config.sequence_headers,
            self.pool.workers,
            min_workers=lambda: self.pool.min_workers,
            reject=lambda job, reason: job.fail(rejected(name, None, reason)),
        )
        self.scaler = Scaler(str(self), self.pool, self.queue, host.free_memory)
        liveness = LivenessCheck(self.pool, config, host.events)
        slow_checks: list[tuple[Callable[[], Awaitable[None]], float]] = []
        if config.memory_limit_mb is not None:
            slow_checks.append((liveness.check_families, FAMILIES_INTERVAL_S))
        if config.detects_hangs and HangDetector.is_supported():
            hangs = HangDetector(self.pool, config, self.step_times, host.events)
            slow_checks.append((hangs.check, hangs.interval_s))
        checks = [liveness.tick, self._cut_unread, self._dispatcher.tick, self.scaler.tick]
        if (config.renew_after or config.renew_above_mb) and not config.sequence_batching:
            checks.append(RenewalCheck(self.pool, config, self.scaler.has_room).tick)
        self._watchdog = Watchdog(str(self), checks, slow_checks)
        for warning in contradictions(config):
            logger.warning("%s: %s", self, warning)

    def __str__(self) -> str:
        return printable(f"{self.name} {self.version}")

    @property
    def is_listed(self) -> bool:
        """Whether it is shown as a model; the functions of workflows are not."""
        return not self.workflow or bool(self.source.url)

    @property
    def was_never_loaded(self) -> bool:
        """Whether it is a startup model that has failed to load so far."""
        pool = self.pool
        return self.loaded_at_startup and not pool.has_loaded and (pool.is_failing_to_load or not pool.may_recover)

    @property
    def envelope(self) -> str:
        """The envelope around the handler: the model's, or else the server's."""
        return self._factory.envelope

    @property
    def num_waiting(self) -> int:
        """Jobs that no worker has begun: those in the queue and those sent in advance."""
        return len(self.queue) + self.traffic.num_ahead

    @property
    def num_in_flight(self) -> int:
        """Jobs accepted and not yet answered."""
        running = sum(batch.remaining for worker in self.pool.workers for batch in worker.batches)
        return len(self.queue) + running + self._num_joined

    @property
    def num_owed(self) -> int:
        """Those of them that somebody waits for: not copies of another version's requests."""
        return len(self.queue) + sum(worker.num_owed for worker in self.pool.workers) + self._num_joined

    @property
    def _num_joined(self) -> int:
        """Jobs that wait for the reply to the same request of another one."""
        return 0 if self.responses is None else self.responses.num_joined

    def use_environment(self, environment: PythonEnvironment) -> None:
        """Run new workers in this Python environment instead of the server's."""
        self._factory.environment = environment

    # ---- jobs ----

    def add(self, job: Job, *, requested_version: str | None = None, is_admitted: bool = False) -> None:
        """Accept a job, or raise why it is rejected; `is_admitted`: it counts for its key already."""
        if job.kind not in ("describe", "adapter", "tokenize"):  # these are no inference
            job.usage = self.traffic.requested(requested_version)
        if self.quarantine is not None:
            self.quarantine.check(job)
        responses = self.responses
        kept = None if responses is None else responses.find(job)
        if kept is None:
            self._check_room(job, requested_version)
        tenant = None if is_admitted else job.tenant
        if tenant is not None:
            job.tenant = None  # until it is admitted
            tenant.admit(self.name, job.estimated_tokens, time.monotonic())
            job.tenant, job.priority = tenant, tenant.priority_of(job.priority)
        if responses is not None:
            if kept is not None:
                responses.answer(job, kept)
                return
            if responses.join(job):
                self._set_deadline(job)
                return
        if reason := self._dispatcher.add(job):
            if job.computation is not None:
                job.computation.abandon()
            if tenant is not None:
                tenant.release(job.estimated_tokens, None, time.monotonic(), is_used=False)
            raise rejected(self.name, requested_version, reason)
        self.scaler.last_arrival = job.arrived
        if job.timeout_s is not None or self.config.client_timeout_s is not None:
            self._set_deadline(job)

    def _compute(self, job: Job) -> None:
        """Give a job that has waited for another one's reply to a worker."""
        try:
            self._check_open()
            if not self.pool.has_ready:
                self._check_recovery(None)
            if reason := self._dispatcher.add(job):
                raise rejected(self.name, None, reason)
        except FlambeauError as error:
            if job.move is None or not job.move(job):
                job.fail(error)

    def _check_room(self, job: Job, requested_version: str | None) -> None:
        """Raise if there is no worker and none will come, or no place in the queue."""
        if not self.pool.has_ready:
            self._check_recovery(requested_version)
        queue, responses = self.queue, self.responses
        num_waiting = len(queue) + self.traffic.num_ahead  # no properties: every request comes through here
        if responses is not None:
            num_waiting += responses.num_joined
        if num_waiting >= queue.capacity and queue.is_full_for(job):
            drained_in_s = self.pool.drain_time_s(len(queue) / self.config.batch_size)
            raise queue_full(self.name, requested_version, queue.capacity, drained_in_s=drained_in_s)

    def _set_deadline(self, job: Job) -> None:
        limit_s, own_s = self.config.client_timeout_s, job.timeout_s
        if (limit_s is None and own_s is None) or job.is_over:
            return
        if limit_s is None or (own_s is not None and own_s < limit_s):
            waited = f"{own_s:g} s ({TIMEOUT_HEADER})"
        else:
            own_s, waited = limit_s, f"{limit_s * 1000:.0f} ms (clientTimeoutInMills)"
        assert own_s is not None
        job.expiry = asyncio.get_running_loop().call_at(job.arrived + own_s, self._expire, job, waited)

    def stand_in_for(self, model: Model, job: Job, on_moved: Callable[[Model], object]) -> None:
        """Take this job over if another version loses its workers while the job waits for them."""
        if model is not self:
            job.move = partial(self._take_over, on_moved)  # without the job, which would keep itself in memory

    def _take_over(self, on_moved: Callable[[Model], object], job: Job) -> bool:
        job.move = None
        if job.computation is not None:
            job.computation.abandon()
            job.computation, job.cache_key = None, b""
        if job.expiry is not None:
            job.expiry.cancel()
            job.expiry = None
        try:
            self.add(job, requested_version=self.version, is_admitted=True)
        except FlambeauError:
            return False
        on_moved(self)
        return True

    def _has_room_for_copies(self) -> bool:
        """Whether a copy of another version's request may wait here: the queue must be less than half full."""
        return self.pool.can_answer and 2 * self.num_waiting < self.queue.capacity

    def count_broken(self, status: int) -> None:
        """Count an answer that has begun, by the status of the error that breaks it off."""
        self.num_broken += status >= FAILED_FROM

    def end_sequence(self, id: str) -> None:
        """End a sequence whose client has gone, so that another can take its place."""
        self._dispatcher.end_sequence(id)

    def _check_recovery(self, requested_version: str | None) -> None:
        """Without a ready worker: start those of a sleeping model; raise if the job would wait in vain."""
        pool = self.pool
        if pool.limits.allow_sleep and not pool.may_recover:
            pool.drop_abandoned()  # a new request is a reason to try again
        self._wake()
        if not pool.may_recover:
            raise no_worker(self.name, requested_version, pool.last_exit)
        if pool.is_failing_to_load:
            raise not_loaded(self.name, pool.last_exit)

    def _wake(self) -> None:
        if self.pool.is_sleeping:
            self._watchdog.start()
            self.scaler.wake()

    def _expire(self, job: Job, waited: str) -> None:
        job.expire(DeadlinePassed(f"Model {self.name!r} did not answer within {waited}."))

    def _cut_unread(self) -> None:
        """End replies whose clients do not read while other jobs wait for their worker."""
        for worker in self.pool.workers:
            if self.queue or (worker.num_batches > worker.depth and not worker.is_concurrent):
                worker.cut_overdue()

    def _reject_all(self, error: Unavailable) -> None:
        for job in self.queue.take_all():
            job.fail(error)

    def _move_or_reject_all(self, error: Unavailable) -> None:
        """Waiting jobs go to the default version if they named none, and no worker has crashed with them."""
        for job in self.queue.take_all():
            if job.move is None or job.crashes or job.started or not job.move(job):
                job.fail(error)

    # ---- workers ----

    async def scale(self, minimum: int, maximum: int, *, wait: bool) -> None:
        """Change the number of workers; with `wait`, return when they have started or raise."""
        self._check_open()
        if minimum > 0 and self.config.response_timeout_s <= 0:
            cause = "the response timeout is 0 seconds, in which no worker can answer"
            raise WorkersFailed(f"Failed to start workers for {self.pool.name}", cause=cause)
        self._check_number(minimum, maximum)
        minimum = self._factory.at_most(minimum)
        self._check_memory(minimum - self.pool.num_present)
        self.pool.set_bounds(minimum, self._factory.at_most(maximum))
        self._watchdog.start()
        self._on_change()
        if wait:
            await self.pool.wait_started(minimum)
            self._check_open()  # it may have been unregistered meanwhile

    def _check_number(self, minimum: int, maximum: int) -> None:
        for name, number in (("min_worker", minimum), ("max_worker", maximum)):
            if number > self._max_workers:
                limit = f"{self._max_workers} workers (max_workers_per_model)"
                raise BadRequest(f"{name} is {number}; a model may have at most {limit}")

    def _check_memory(self, num_new: int) -> None:
        """Raise if so many more workers cannot fit, going by what those that run had once they were loaded."""
        size = min((worker.loaded_bytes for worker in self.pool.workers if worker.is_ready), default=0)
        available = available_bytes()
        if num_new > 0 and available is not None and size * num_new > available + free_swap_bytes():
            cause = (
                f"{num_new} more workers need at least {size * num_new >> 20} MB of memory, {size >> 20} MB each, "
                f"and {available >> 20} MB are left; ask for fewer workers"
            )
            raise WorkersFailed(f"Failed to start workers for {self.pool.name}", cause=cause, out_of_memory=True)

    def _check_open(self) -> None:
        if self.pool.is_closed:
            raise ModelRemoved(self.name)

    async def close(self, reason: str, *, now: bool = False) -> None:
        """Reject waiting jobs, finish running ones and stop the workers; with `now`, kill them."""
        self._reject_all(Unavailable(reason))
        self._watchdog.stop()
        await self.pool.close(now=now)
        self._reject_all(Unavailable(reason))  # jobs that a killed worker returned
        self._dispatcher.close()

    def report_loaded(self) -> None:
        """Report the model as loaded, once: with its first worker, or registered without one."""
        if not self._is_reported:
            self._is_reported = True
            self._events.model_loaded(self.name)

    def _new_slot(self) -> Slot:
        return self._factory.new_slot(sum(slot.placement is None for slot in self.pool.slots))

    def _new_worker(self, slot: Slot) -> RemoteWorker:
        return self._factory.new_worker(
            slot,
            num_workers=self.pool.max_workers,
            on_free=self._dispatcher.feed,
            on_lost=partial(self._on_worker_exit, slot),
            traffic=self.traffic,
            step_times=self.step_times,
            slow=self.slow,
        )

    def _on_worker_exit(
        self, slot: Slot, worker_exit: WorkerExit, suspects: list[tuple[Job, int]], innocent: list[Job]
    ) -> None:
        """Retry or fail the jobs of a worker that exited; `suspects` come with the size of their batch."""
        if not slot.is_retired and not worker_exit.is_final:  # one line of the log says all of a final failure
            slot.bundle = self._write_bundle(slot, worker_exit, suspects)
        for job in reversed(innocent):
            self.queue.put_back(job)
        for job, batch_size in reversed(suspects):
            job.crashes += 1
            job.retried = time.monotonic()
            if not (self.config.sequence_batching or job.is_copy) and should_retry(
                worker_exit,
                batch_size=batch_size,
                crashes=job.crashes,
                reply_started=job.started,
                can_resume=job.can_resume,
            ):
                job.is_alone = True
                # Generations are long, so those whose worker was killed from outside resume together.
                job.is_suspect = not ("generate" in self.abilities and worker_exit.is_external)
                self.queue.put_back(job)
            else:
                if self.quarantine is not None and batch_size == 1:
                    self.quarantine.blame(job, worker_exit)
                job.fail(WorkerDied(cause=worker_exit.cause, out_of_memory=worker_exit.out_of_memory))
        self._on_change()
        self._dispatcher.on_worker_exit()

    def _write_bundle(self, slot: Slot, worker_exit: WorkerExit, suspects: list[tuple[Job, int]]) -> str:
        """Write a crash bundle and return its path. A load failure that repeats has the bundle of the first."""
        before = slot.last_exit
        if worker_exit.while_loading and before is not None and is_same_failure(before, worker_exit):
            return slot.bundle
        now = time.time()
        path = self._crash_bundles.add(
            CrashReport(
                at=now,
                worker=slot.ref,
                pids=slot.worker.pids if slot.worker else [],
                age_s=now - slot.started_at,
                device=slot.device,
                node=slot.worker.node if slot.worker else "",
                exit=worker_exit,
                model=self._record(),
                requests=read_requests(suspects),
            )
        )
        if not path and worker_exit.stacks:
            logger.warning("%s: what it did when it was ended:\n%s", slot.ref, worker_exit.stacks)
        return path

    def _record(self) -> dict[str, Any]:
        """What it takes to serve this model again."""
        source, config = self.source, self.config
        script = source.folder / self.handler
        if source.origin is not None:
            path = source.origin.path
        else:
            path = script if script.suffix == ".py" and script.is_file() else source.folder
        return {
            "name": self.name,
            "version": self.version,
            "url": masked(source.url),
            "path": str(path),
            "handler": self.handler,
            "envelope": self.envelope,
            "decodeInput": self._server_config.decode_input_request,
            "python": self._factory.environment.python,
            "batchSize": config.batch_size,
            "responseTimeout": config.response_timeout_s,
            "startupTimeout": config.startup_timeout_s,
            "hangDetection": config.detects_hangs,
            "hangTimeoutInSec": config.hang_s,
            "usualBatchInSec": self.step_times.usual_s if self.step_times.is_learned else None,
            "config": config.options,
        }

    def _on_change(self) -> None:
        """Workers have started, loaded or exited."""
        for worker in self.pool.workers:
            if worker.is_ready:
                self.abilities, self.max_length = frozenset(worker.abilities), worker.max_length
                if self.responses is not None and "generate" in self.abilities and not self.responses.is_off:
                    logger.warning("%s: responseCacheMb has no effect: generated texts are not kept", self)
                    self.responses.turn_off()
                self.adapters.configure(worker.adapters)
                self.example = worker.example
                self.inputs, self.outputs = worker.inputs, worker.outputs
                self.report_loaded()
        if self.queue:  # a worker that stopped for lack of load may have returned jobs
            self._wake()
        if not self.pool.may_recover:
            self._move_or_reject_all(no_worker(self.name, None, self.pool.last_exit))
        elif self.pool.is_failing_to_load:  # the next attempt would probably fail too
            self._move_or_reject_all(not_loaded(self.name, self.pool.last_exit))


def rejected(model: str, version: str | None, reason: str = "") -> Unavailable:
    """No worker can take the job; `version` is the one that the client named."""
    return Unavailable(rejection_text(model, version, reason), plain=plain_rejection(model, reason))


def rejection_text(model: str, version: str | None, reason: str) -> str:
    # Clients match this text, including the odd quotation mark. Only `reason` is ours.
    named = f'Model "{model}" Version {version}"' if version else f'Model "{model}"'
    text = f"{named} has no worker to serve inference request. {REMEDY}"
    return f"{text}. {reason}" if reason else text


def plain_rejection(model: str, reason: str) -> str:
    text = f'Model "{model}" has no worker to serve inference request'
    return f"{text}. {reason}" if reason else f"{text}. Add some: flambeau models scale {model} 1"


def no_worker(model: str, version: str | None, last_exit: WorkerExit | None) -> Unavailable:
    """There is no worker and none will be started."""
    return rejected(model, version, f"The last worker: {last_exit.reason}" if last_exit else "")


def not_loaded(model: str, last_exit: WorkerExit | None) -> Unavailable:
    """The model could not be loaded; another attempt follows."""
    reason = last_exit.reason if last_exit else "the model could not be loaded"
    return Unavailable(f'Model "{model}" has no worker yet and is tried again: {reason}', retry_after_s=1)


def queue_full(model: str, version: str | None, capacity: int, *, drained_in_s: float) -> QueueFull:
    reason = f"All {capacity} places in its queue are taken (jobQueueSize, job_queue_size)."
    retry_after_s = max(1, round(drained_in_s))
    plain = (
        f'The queue of model "{model}" is full: all {capacity} places are taken (jobQueueSize). '
        f"Try again in {retry_after_s} s, add workers, or raise --job-queue-size."
    )
    return QueueFull(rejection_text(model, version, reason), retry_after_s=retry_after_s, plain=plain)
