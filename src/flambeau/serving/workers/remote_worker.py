"""RemoteWorker: the server's end of one worker: its channel and its jobs in flight."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from flambeau.errors import InvalidInput, JobFailed, ReplyNotRead
from flambeau.metrics.traffic import ModelTraffic, smoothed
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.job import Job
from flambeau.serving.job_times import JobTimes, Span
from flambeau.serving.reply_budget import hold_up_s
from flambeau.serving.slow_requests import MAX_SHARED, Explanation, SlowRequests, explain
from flambeau.serving.workers.health import StepTimes
from flambeau.serving.workers.host_resources import private_bytes_of
from flambeau.serving.workers.in_flight import Batch, InFlight
from flambeau.serving.workers.launcher import Launcher
from flambeau.serving.workers.rank_group import RankGroup
from flambeau.serving.workers.worker_life import NewLife, NodePlacement, WorkerLife
from flambeau.serving.workers.worker_output import KEPT_LINES, WorkerOutput
from flambeau.serving.workers.worker_process import WorkerProcess, WorkerSpec
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import (
    Cancel,
    EngineReport,
    Failed,
    Flow,
    Part,
    Ready,
    Run,
    Samples,
    Stop,
    TensorSpec,
    ToServer,
    Work,
)

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 2.0  # between the end of the channel and SIGKILL
STACKS_S = 1.0  # for a stalled worker to write its stacks; on a busy machine a signal may take its time
LAST_FRAMES_S = 0.5  # between the end of the process and that of the channel


class RemoteWorker:
    """One worker: a process or a group. `ready` is set when the model is loaded, `ended` when the process is gone."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        on_free: Callable[[], None],
        on_lost: Callable[[WorkerExit, list[tuple[Job, int]], list[Job]], None],
        on_samples: Callable[[Samples], None],
        traffic: ModelTraffic,
        slow: SlowRequests,
        output: WorkerOutput,
        events: ServerEvents,
        launcher: Launcher,
        placement: NodePlacement | None = None,
        step_times: StepTimes | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[WorkerExit] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self.started_at = time.time()
        self.load_s: float | None = None
        self._began = time.monotonic()
        self.is_ready = False
        self.is_retiring = False
        self.is_ending = False  # its stacks are being written, then it is killed
        self.is_concurrent = False
        self.is_continuous = False
        self.depth = 1
        self.places = 0  # jobs it takes at a time, one by one; 0: as the model's settings say
        self.abilities: list[str] = []
        self.adapters: list[str] = []
        self.example = ""
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []
        self.max_length = 0  # tokens of prompt and reply together; 0: not known
        self.shares_memory = False
        self.service_s: float | None = None
        self.health = ""  # in words, if it is slow or hangs
        self._step_times = step_times or StepTimes()
        self.ready_at: float | None = None
        self.loaded_bytes = 0  # its own memory when the model was loaded
        self.has_answered = False
        self.num_answered = 0
        self.has_suspect = False  # the job sent last was in a worker that crashed
        self._in_flight = InFlight(traffic)
        self.batches = self._in_flight.batches
        self._jobs = self._in_flight.jobs
        self._on_free = on_free
        self._on_lost = on_lost
        self._on_samples = on_samples
        self._now = time.monotonic  # the event loop's clock ticks in milliseconds
        self._traffic = traffic
        self._slow = slow
        # Those of a concurrent worker that are over: their ids, when they were sent, and when they ended.
        self._recent: deque[tuple[str, float, float]] = deque(maxlen=MAX_SHARED)
        self._output = output
        self._events = events
        self._reports_batches = events.reports_batches
        self._name = spec.name
        self._channel: ServerChannel | RankGroup | None = None
        self.placement = placement
        new_life: NewLife = partial(WorkerProcess, events=events, launcher=launcher)
        if placement is not None:
            new_life = placement.new_life
        self._process: WorkerLife | RankGroup
        if spec.others:
            self._channel = self._process = RankGroup(spec, self._receive, self._on_channel_closed, output, new_life)
        else:
            self._process = new_life(spec, self._new_channel, output)

    # ---- life cycle ----

    @property
    def pid(self) -> int:
        """The process id, or 0 before there is one."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The process ids of all its ranks, each on its machine."""
        return self._process.pids if isinstance(self._process, RankGroup) else [self._process.pid]

    @property
    def local_pids(self) -> list[int]:
        """Those of its processes that run on this machine."""
        return self._process.local_pids

    @property
    def processes(self) -> Sequence[WorkerLife]:
        """Its processes, by rank."""
        return self._process.processes if isinstance(self._process, RankGroup) else [self._process]

    @property
    def resident_by_rank(self) -> list[int]:
        """The resident memory of each process, as last known."""
        process = self._process
        return process.resident_by_rank if isinstance(process, RankGroup) else [process.resident_bytes]

    @property
    def resident_bytes(self) -> int:
        return self._process.resident_bytes

    @property
    def node(self) -> str:
        """The machines it runs on; empty: this one."""
        return self.placement.node if self.placement is not None else ""

    @property
    def waiting(self) -> str:
        """The machine that it waits for, in words; empty if it waits for none."""
        return self.placement.waiting if self.placement is not None else ""

    @property
    def has_exited(self) -> bool:
        """Whether the process is gone. `is_ready` tells it a moment later, but costs no system call."""
        return self._process.has_exited

    def seconds_loading(self) -> float:
        """How long its process has been starting; 0 while it waits for a machine."""
        if self.placement is None:
            return self._now() - self._began
        return self._now() - max(self._began, self.placement.acquired_at) if self.placement.acquired_at else 0.0

    @property
    def local_pid(self) -> int:
        """The process id on this machine, or 0."""
        pids = self._process.local_pids
        return pids[0] if pids else 0

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What it printed last."""
        return self._output.tail.lines(KEPT_LINES)

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    @property
    def num_owed(self) -> int:
        """How many of its jobs somebody waits for."""
        return self._in_flight.num_owed

    @property
    def tenants(self) -> Counter[str]:
        """The number of its jobs by tenant."""
        jobs = (job for job, _ in self._jobs.values())
        return Counter(job.tenant.name for job in jobs if job is not None and job.tenant is not None)

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.is_retiring and not self.batches

    async def run(self) -> WorkerExit:
        """Run the process to its end; its unfinished jobs go to `on_lost`."""
        worker_exit = await self._process.run()
        if self._channel is not None:  # its last messages may still be in the socket
            await asyncio.wait([self._closed], timeout=LAST_FRAMES_S)
        return self._end(worker_exit)

    def _new_channel(self) -> ServerChannel:
        channel = ServerChannel(self._receive, self._on_channel_closed, self.spec.max_frame_bytes)
        self._channel = channel
        return channel

    def _end(self, worker_exit: WorkerExit) -> WorkerExit:
        """Return the unfinished jobs: those of batches it worked on, and those it had not begun."""
        self.is_ready = False
        if self._channel is not None:
            self._channel.close()
        suspects, innocent = self._in_flight.drain()
        if not self.ready.done():
            self.ready.cancel()
        self._traffic.engine.forget(self._name)
        self.ended.set_result(worker_exit)
        self._on_lost(worker_exit, suspects, innocent)
        return worker_exit

    def kill(self, cause: WorkerExit) -> None:
        """Kill the process and its children."""
        self._process.kill(cause)

    def kill_with_stacks(self, cause: WorkerExit) -> None:
        """Kill the process when it has written its stacks, or cannot, or takes too long for that."""
        if not self.is_ending:
            self.is_ending = True
            self._ending = asyncio.ensure_future(self._kill_with_stacks(cause))

    async def _kill_with_stacks(self, cause: WorkerExit) -> None:
        tasks = [asyncio.ensure_future(process.take_stacks()) for process in self.processes]
        done, late = await asyncio.wait(tasks, timeout=STACKS_S)
        for task in late:
            task.cancel()
        texts = [task.result().text for task in tasks if task in done and task.exception() is None]
        self.kill(replace(cause, stacks="\n".join(text for text in texts if text)))

    async def retire(self, timeout_s: float) -> None:
        """Let it finish its jobs, then stop it; kill it after `timeout_s`."""
        self.is_retiring = True
        if not self.is_ready:
            self.kill(WorkerExit(reason="it was stopped before its model had loaded", spares_jobs=True))
        elif self._channel is not None:
            self._channel.send(Stop())
        done, _ = await asyncio.wait([self.ended], timeout=timeout_s)
        if not done:
            self.kill(WorkerExit(reason=f"it did not stop within {timeout_s:g} s", spares_jobs=True))

    # ---- work ----

    def send(self, jobs: Sequence[Job], held_since: float = 0.0) -> None:
        """Send these jobs as one batch; it may have waited for more jobs since a point in time."""
        batch = self._in_flight.add(jobs, self._now(), held_since)
        self.has_suspect = jobs[0].is_suspect
        share = self.shares_memory
        requests = []
        for job in jobs:
            job.on_cancel = self._cancel
            job.flow = self
            if job.body.segment is not None:
                job.body.hold()
            if job.trace is not None:
                job.trace.sent(job, self._name, jobs)
            requests.append(job.to_request(share=share))
        assert self._channel is not None
        if batch.is_ahead:  # the worker is busy, so that several such batches may travel together
            self._channel.send_soon(Run(requests))
        else:
            self._channel.send(Run(requests))
        if self._reports_batches:
            self._events.batch_sent(self._name)

    def take_back(self) -> list[Job]:
        """Take away the jobs that it has not begun, for an idle worker."""
        taken = self._in_flight.take_back()
        if taken and self._channel is not None:
            self._channel.send(Cancel([*taken]))
        return [*taken.values()]

    def _cancel(self, job: Job) -> None:
        if self._channel is not None and job.id in self._jobs:
            if self.is_continuous:
                self._events.stream_cancelled(self._name, job.request_id)
            self.resume(job)
            self._channel.send(Cancel([job.id]))

    def pause(self, job: Job, excess_bytes: int) -> None:
        """Produce no more of a reply until its client has read `excess_bytes`."""
        if self._in_flight.pause(job.id, self._now() + hold_up_s(excess_bytes)) and self._channel is not None:
            self._channel.send(Flow(job.id, True))

    def resume(self, job: Job) -> None:
        if self._in_flight.resume(job.id, self._now()) and self._channel is not None:
            self._channel.send(Flow(job.id, False))

    def cut_overdue(self) -> None:
        """End replies whose clients do not read, and for which other jobs have waited too long."""
        for job in self._in_flight.overdue(self._now()) if self._in_flight.paused else ():
            text = "request %s: its client does not read, and other requests wait for %s; its reply is cut"
            logger.warning(text, job.request_id, self._name, extra={**job.log_fields, "worker": self._name})
            job.expire(ReplyNotRead())

    def seconds_silent(self) -> float:
        """How long it has made no progress that it could have made; 0 when it is idle."""
        return self._in_flight.seconds_silent(self._now())

    def seconds_without_progress(self) -> float:
        """How long its current batch has made no progress; 0 when it is idle."""
        return self._in_flight.seconds_without_progress(self._now())

    def blame_silent(self, limit_s: float) -> None:
        """Count a crash for the jobs of a concurrent worker that made no progress for so long."""
        self._in_flight.blame_silent(limit_s, self._now())

    # ---- messages ----

    def _receive(self, messages: list[ToServer]) -> None:
        """Handle messages; parts of one reply that arrived together are delivered together."""
        if self._in_flight.answers_all:
            self._in_flight.last_message_at = self._now()
        i = 0
        while i < len(messages):
            message = messages[i]
            i += 1
            if type(message) is Part:
                parts = [message]
                while not message.last and i < len(messages):
                    following = messages[i]
                    if type(following) is not Part or following.job_id != message.job_id:
                        break
                    parts.append(following)
                    i += 1
                self._on_parts(parts)
            elif type(message) is Failed:
                self._on_failed(message)
            elif type(message) is Ready:
                self._on_ready(message)
            elif type(message) is Samples:
                self._on_samples(message)
            elif type(message) is EngineReport:
                self._traffic.engine.add(self._name, message)

    def _on_ready(self, message: Ready) -> None:
        if not isinstance(self._process, RankGroup):  # a group notes it for each rank
            self._process.note_ready()
        self.is_concurrent = self._in_flight.is_concurrent = message.is_concurrent
        self.is_continuous = message.is_continuous
        self._in_flight.answers_all = message.is_continuous or message.places > 0
        self.places, self.abilities, self.max_length = message.places, message.abilities, message.max_length
        self.adapters = message.adapters
        self.example = message.example
        self.inputs, self.outputs = message.inputs, message.outputs
        self.depth = self._in_flight.depth = message.depth
        self.shares_memory = message.can_share_memory
        self.is_ready = True
        self.loaded_bytes = private_bytes_of(self.local_pids)
        self.ready_at = self._now()
        self.load_s = self.seconds_loading()
        self._traffic.loaded(self._name, self.load_s)
        if not self.ready.done():
            self.ready.set_result(None)
        self._on_free()

    def _on_parts(self, parts: list[Part]) -> None:
        job_id = parts[0].job_id
        entry = self._jobs.get(job_id)
        if entry is None:
            return
        job, batch = entry
        first, last = parts[0], parts[-1]
        is_waited_for = job is not None and not job.is_over
        if last.work is not None:
            batch.work = last.work if self.placement is None else in_own_time(last.work, self._now())
        if job is not None:
            if last.last or not job.started:
                first_part = job.times.received if job.started and job.times is not None else 0.0
                job.times = self._times(job, batch, batch.work, first_part)
            if self.places and not last.last:
                job.keep_state(parts)
                self.has_answered = True
            try:
                job.deliver(parts)
            except Exception:  # an error in a receiver must not affect the other jobs of this worker
                text = "request %s: the receiver failed to take a reply"
                logger.exception(text, job.request_id, extra=job.log_fields)
                job.cancel()  # nobody takes the rest of the reply
                job.report(JobFailed("The answer could not be delivered.", status=500))  # or the client would wait
        if last.last:
            if last.work is not None and batch.work is not None and (job is None or job.kind != "describe"):
                traffic = self._traffic
                traffic.predicted(last.work.handler_s, batch.ids if traffic.log_prediction is not None else ())
                traffic.worked(batch.work, batch.started - job.arrived if job is not None else 0.0)
            self._finish(job_id, job, batch, first.status if is_waited_for else 0)
        else:
            is_first_part = batch.progress == batch.started
            batch.progress = self._now()
            if is_first_part and self.is_continuous:  # the next job of its session may join
                self._on_free()

    def _times(self, job: Job, batch: Batch, work: Work | None = None, first_part: float = 0.0) -> JobTimes:
        return JobTimes(
            job.arrived,
            batch.sent,
            batch.started,
            self._now(),
            self._name,
            batch.size,
            work,
            batch.held_since,
            first_part,
            job.retried,
        )

    def explain(self, job: Job, status: int) -> Explanation | None:
        """Where the time of a job went; None if it is not known."""
        if job.times is None or job.id not in self._jobs:
            return None
        return self._explain(job, self._jobs[job.id][1], status, self._now())

    def _explain(self, job: Job, batch: Batch, status: int, now: float) -> Explanation:
        assert job.times is not None
        shared = batch.ids
        if self.is_concurrent:
            shared = [other.request_id for other, _ in self._jobs.values() if other is not None]
            shared += [request_id for request_id, _, ended in self._recent if ended > batch.sent]
        load: Span | None = None
        if self.ready_at is not None and self.load_s is not None and self.ready_at > job.arrived:
            load = ("loading the model", self._began, self.load_s)
        return explain(
            job.times,
            request_id=job.request_id,
            model=self.spec.load.model,
            version=self.spec.load.version,
            status=status,
            shared_with=shared,
            loaded=load,
            crashes=job.crashes,
            now=now,
            wall_time=time.time(),
        )

    def _on_failed(self, failed: Failed) -> None:
        if not failed.job_ids:
            assert not isinstance(self._process, RankGroup)  # a group keeps the failure itself
            self._process.load_failure = failed
            self._events.load_failed(self._name, failed.message, "" if failed.is_final else failed.detail)
            return
        for job_id in failed.job_ids:
            entry = self._jobs.get(job_id)
            if entry is None:
                continue
            job, batch = entry
            is_waited_for = job is not None and not job.is_over
            if job is not None:
                job.times = self._times(job, batch)
                job.fail(to_error(failed))
            self._finish(job_id, job, batch, failed.status if is_waited_for else 0)

    def _finish(self, job_id: int, job: Job | None, batch: Batch, status: int) -> None:
        """Remove a finished job; after the last of its batch the worker can take another batch.

        Status 0: the job was cancelled, so it is not counted as answered.
        """
        now = self._now()
        if status and job is not None and job.usage is not None:
            self._traffic.answered(job.usage, now - job.arrived, batch.started - job.arrived, status)
            if job.trace is not None:
                total_s, queue_s = now - job.arrived, batch.started - job.arrived
                self._traffic.traced(job.trace.trace_id, total_s, queue_s, status, batch.work, time.time())
            if batch.held_since:
                self._traffic.batch_waited(batch.sent - max(batch.held_since, job.arrived))
        if job is not None:
            times = job.times
            if times is not None and (times.total_s > self._slow.least_s or now > self._slow.ends):
                self._slow.add(times.total_s, self._explain(job, batch, status, now), now)
            if self.is_concurrent:
                self._recent.append((job.request_id, batch.sent, now))
        self.has_answered = True
        self.num_answered += 1
        if job is not None and job.body.segment is not None:
            job.body.release()
        if not self._in_flight.finish(job_id, batch, now):
            return
        self._traffic.batch_done(batch.size, now - batch.started - (batch.work.handler_s if batch.work else 0.0))
        taken_s = now - batch.started
        self.service_s = smoothed(self.service_s, taken_s)
        self._step_times.add(taken_s)
        self._on_free()

    def _on_channel_closed(self, fault: str) -> None:
        """The worker is exiting or sent an invalid frame; it gets a moment to exit by itself."""
        self.is_ready = False
        self._process.on_channel_closed()
        if not self._closed.done():
            self._closed.set_result(None)
        if fault:
            self.kill(WorkerExit(reason=f"it {fault}"))
        elif not self.ended.done():
            cause = WorkerExit(reason="it closed its channel without exiting")
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.kill, cause)


def in_own_time(work: Work, now: float) -> Work:
    """The work of another machine, whose clock is another, as if its end was the moment when its reply arrived."""
    shift = now - work.ended
    pauses = work.pauses and [(what, began + shift, seconds) for what, began, seconds in work.pauses]
    return msgspec.structs.replace(work, began=work.began + shift, ended=now, pauses=pauses)


def to_error(failed: Failed) -> JobFailed:
    kind = InvalidInput if failed.is_bad_request else JobFailed
    error = kind(failed.message, status=failed.status, cause=failed.detail, reason=failed.reason)
    if isinstance(error, InvalidInput):
        error.field = failed.field
    return error
