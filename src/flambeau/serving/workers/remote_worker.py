"""RemoteWorker: the server's end of one worker: its channel and the jobs it holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from flambeau.errors import JobFailed
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.job import Job
from flambeau.serving.scheduling.batching import smoothed
from flambeau.serving.workers.holding import Batch, Holding
from flambeau.serving.workers.output import WorkerOutput
from flambeau.serving.workers.rank_group import RankGroup
from flambeau.serving.workers.recovery import Death
from flambeau.serving.workers.worker_process import WorkerProcess, WorkerSpec
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import Cancel, Failed, Part, Ready, Run, Samples, Stop, ToServer

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 2.0  # between the end of the channel and SIGKILL
LAST_FRAMES_S = 0.5  # between the end of the process and that of the channel


class RemoteWorker:
    """One worker process. `ready` ends when the model is loaded, `ended` when the process is gone."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        on_free: Callable[[], None],
        on_lost: Callable[[Death, list[tuple[Job, int]], list[Job]], None],
        on_samples: Callable[[Samples], None],
        traffic: ModelTraffic,
        output: WorkerOutput,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Death] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()  # the channel is
        self.started_at = time.time()
        self.load_s: float | None = None
        self._began = time.monotonic()
        self.is_ready = False
        self.is_retiring = False
        self.is_concurrent = False
        self.is_continuous = False
        self.depth = 1
        self.places = 0  # jobs it takes at a time; 0: as the model's settings say
        self.abilities: list[str] = []
        self.max_length = 0  # of what it generates, with the prompt; 0: not known
        self.shares_memory = False
        self.service_s: float | None = None
        self.ready_at: float | None = None
        self.has_answered = False
        self.has_suspect = False  # the job sent last has seen a worker die
        self._held = Holding(traffic)
        self.batches = self._held.batches
        self._jobs = self._held.jobs
        self._on_free = on_free
        self._on_lost = on_lost
        self._on_samples = on_samples
        self._now = time.monotonic  # the event loop's clock ticks in milliseconds
        self._traffic = traffic
        self._output = output
        self._channel: ServerChannel | RankGroup | None = None
        self._process: WorkerProcess | RankGroup
        if spec.others:
            self._channel = self._process = RankGroup(spec, self._receive, self._on_channel_closed, output)
        else:
            self._process = WorkerProcess(spec, self._new_channel, output)

    # ---- life ----

    @property
    def pid(self) -> int:
        """The process id, or -1 before there is one."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The process ids of all its ranks; one, unless it is a group."""
        return self._process.pids

    @property
    def num_batches(self) -> int:
        """Batches it holds."""
        return len(self.batches)

    @property
    def is_idle(self) -> bool:
        """Whether it could start on a job this instant."""
        return self.is_ready and not self.is_retiring and not self.batches

    async def run(self) -> Death:
        """Start the process, let it live, and return how it ended; jobs it held go to `on_lost`."""
        death = await self._process.run()
        if self._channel is not None:  # what it said last may still lie in the socket
            await asyncio.wait([self._closed], timeout=LAST_FRAMES_S)
        return self._end(death)

    def _new_channel(self) -> ServerChannel:
        channel = ServerChannel(self._receive, self._on_channel_closed, self.spec.max_frame_bytes)
        self._channel = channel
        return channel

    def _end(self, death: Death) -> Death:
        """Hand back the jobs: those of the batch it worked on, and those it had not begun."""
        self.is_ready = False
        if self._channel is not None:
            self._channel.close()
        suspects, innocent = self._held.part()
        if not self.ready.done():
            self.ready.cancel()
        self.ended.set_result(death)
        self._on_lost(death, suspects, innocent)
        return death

    def kill(self, fate: Death) -> None:
        """End the process and its children now; `fate` says why."""
        self._process.kill(fate)

    async def retire(self, timeout_s: float) -> None:
        """Let it finish what it holds, then stop it; kill it when that takes too long."""
        self.is_retiring = True
        if not self.is_ready:
            self.kill(Death(reason="it was stopped before its model had loaded", spares_jobs=True))
        elif self._channel is not None:
            self._channel.send(Stop())
        done, _ = await asyncio.wait([self.ended], timeout=timeout_s)
        if not done:
            self.kill(Death(reason=f"it did not stop within {timeout_s:g} s", spares_jobs=True))

    # ---- work ----

    def send(self, jobs: Sequence[Job]) -> None:
        """Send these jobs as one batch."""
        batch = self._held.add(jobs, self._now())
        self.has_suspect = jobs[0].is_suspect
        if self._traffic.log_value is not None:
            batch.ids = [job.request_id for job in jobs]
        share = self.shares_memory
        requests = []
        for job in jobs:
            job.on_cancel = self._cancel
            if job.body.segment is not None:
                job.body.hold()
            requests.append(job.to_request(share=share))
        assert self._channel is not None
        self._channel.send(Run(requests))
        if self._output.is_told:
            self._output.say(f"Backend received inference at: {int(time.time())}")

    def take_back(self) -> list[Job]:
        """Jobs it has not begun, taken away from it so that an idle worker can have them."""
        taken = self._held.take_back()
        if taken and self._channel is not None:
            self._channel.send(Cancel([*taken]))
        return [*taken.values()]

    def _cancel(self, job: Job) -> None:
        if self._channel is not None and job.id in self._jobs:
            if self.is_continuous:
                logger.info("Connection to client got closed; Removing job: %s", job.request_id)
            self._channel.send(Cancel([job.id]))

    def seconds_without_progress(self) -> float:
        """How long the batch it works on has shown no sign of progress; 0 when it is idle."""
        return self._held.seconds_without_progress(self._now())

    def blame_silent(self, limit_s: float) -> None:
        """Where jobs run beside others: those silent for so long are to blame, and not tried again with the rest."""
        self._held.blame_silent(limit_s, self._now())

    # ---- what it says ----

    def _receive(self, messages: list[ToServer]) -> None:
        """Take what has arrived; parts of one reply that arrived together are passed on together."""
        if self._held.speaks_for_all:
            self._held.heard_at = self._now()
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

    def _on_ready(self, message: Ready) -> None:
        self.is_concurrent = self._held.is_concurrent = message.is_concurrent
        self.is_continuous = message.is_continuous
        self._held.speaks_for_all = message.is_continuous or message.places > 0
        self.places, self.abilities, self.max_length = message.places, message.abilities, message.max_length
        self.depth = self._held.depth = message.depth
        self.shares_memory = message.can_share_memory
        self.is_ready = True
        self.ready_at = self._now()
        self.load_s = self.ready_at - self._began
        self._traffic.loaded(self.spec.name, self.load_s)
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
        if job is not None:
            if self.places and not last.last:
                job.keep_state(parts)
                self.has_answered = True
            try:
                job.deliver(parts)
            except Exception:  # a receiver's mistake must not cost the other jobs of this worker
                logger.exception("request %s: its answer could not be delivered", job.request_id)
                job.cancel()  # unless it is over: what follows is for nobody
                job.tell(JobFailed("The answer could not be delivered.", status=500))  # so that no client hangs
        if last.last:
            if last.handler_s:
                batch.handler_s = last.handler_s
                if job is None or job.kind != "describe":
                    self._traffic.predicted(last.handler_s, batch.ids)
            self._finish(job_id, job, batch, first.status if is_waited_for else 0)
        else:
            is_first_sign = batch.progress == batch.started
            batch.progress = self._now()
            if is_first_sign and self.is_continuous:  # the next job of its sequence may join
                self._on_free()

    def _on_failed(self, failed: Failed) -> None:
        if not failed.job_ids:
            assert isinstance(self._process, WorkerProcess)  # a group takes note of it by itself
            self._process.load_failure = failed
            words = [failed.message] if failed.is_final else failed.detail.splitlines()
            self._output.say("Backend worker process died.", *words)
            return
        for job_id in failed.job_ids:
            entry = self._jobs.get(job_id)
            if entry is None:
                continue
            job, batch = entry
            is_waited_for = job is not None and not job.is_over
            if job is not None:
                job.fail(JobFailed(failed.message, status=failed.status, cause=failed.detail))
            self._finish(job_id, job, batch, failed.status if is_waited_for else 0)

    def _finish(self, job_id: int, job: Job | None, batch: Batch, status: int) -> None:
        """A job has left the worker; when it was the last of its batch, there is room for another.

        A status of 0 is that of a job nobody waited for.
        """
        now = self._now()
        if status and job is not None and job.usage is not None:
            self._traffic.answered(job.usage, now - job.arrived, batch.started - job.arrived, status)
        self.has_answered = True
        if job is not None and job.body.segment is not None:
            job.body.release()
        if not self._held.finish(job_id, batch, now):
            return
        self._traffic.batch_done(batch.size, now - batch.started - batch.handler_s)
        self.service_s = smoothed(self.service_s, now - batch.started)
        self._on_free()

    def _on_channel_closed(self, fault: str) -> None:
        """The worker is ending, or has lost its mind: give it a moment to exit by itself."""
        self.is_ready = False
        if not self._closed.done():
            self._closed.set_result(None)
        if fault:
            self.kill(Death(reason=f"it {fault}"))
        elif not self.ended.done():
            fate = Death(reason="it closed its channel without exiting")
            asyncio.get_running_loop().call_later(EXIT_GRACE_S, self.kill, fate)
