"""Generating: a handler that makes its replies step by step, for many jobs at a time, which join and leave freely."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec.structs import replace

from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Cancel, Failed, Part, Ready, Request, Run, Samples, Schedule, Stop, ToWorker
from flambeau.worker.failures import to_failed
from flambeau.worker.inputs import Row, types_of
from flambeau.worker.loader import Entry
from flambeau.worker.replier import Replier
from flambeau.worker.runner import Runner

logger = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 1.0  # while replies are in the making and nothing of them is sent, the server hears this often
FAILURES = 2  # steps in a row that may fail before the process is given up


@runtime_checkable
class Generation(Protocol):
    """What a handler's `generation()` returns: the worker calls it from one thread, between steps and for them."""

    places: int  # jobs it takes at a time
    abilities: Sequence[str]  # what front ends may ask for beside predictions: "generate", "chat", "embed"

    @property
    def has_work(self) -> bool:
        """Whether a step would make anything."""

    def join(self, request: Request, row: Row) -> None:
        """Take a job, or raise: then it fails with that. `request.state` is what to go on from."""

    def step(self) -> Sequence[Part | tuple[int, Exception]]:
        """Make the next pieces. A part that is `last` ends its job, as does what went wrong with it alone."""

    def cancel(self, job_id: int) -> None:
        """Nobody waits for that job any more: free at once what it holds."""

    def follow(self) -> None:
        """On a rank other than 0: do what rank 0 does, until it has closed."""

    def close(self) -> None:
        """The end; nothing is in the making."""


def generation_of(entry: Entry, schedule: Schedule) -> Generation | None:
    """How a handler generates, where it does; sequences of requests and an envelope around it need whole replies."""
    make: Any = getattr(entry.handler, "generation", None)
    if not callable(make) or entry.envelope or schedule == "sequences":
        return None
    generation: Generation | None = make()
    return generation


def ready_to_generate(generation: Generation, *, can_share_memory: bool) -> Ready:
    """What a worker that generates announces."""
    return Ready(
        is_concurrent=True,
        can_share_memory=can_share_memory,
        places=generation.places,
        abilities=[*generation.abilities],
        max_length=getattr(generation, "max_length", 0),
    )


class GeneratingLoop:
    """Steps as long as there is work; whatever the server says is heard before the next step."""

    def __init__(self, channel: WorkerChannel, runner: Runner, replier: Replier, generation: Generation) -> None:
        self._channel = channel
        self._runner = runner
        self._replier = replier
        self._generation = generation
        self._joined: dict[int, tuple[Request, float]] = {}  # job → its request, and when it joined
        self._is_stopping = False
        self._num_failures = 0  # of steps, in a row
        self._said_at = 0.0
        if hasattr(generation, "outlet"):  # a request that is run alone keeps nobody else waiting
            generation.outlet = self._send

    def run(self) -> None:
        """Generate until the server says stop, and what was begun is finished, or the server is gone."""
        try:
            while self._listen():
                if self._generation.has_work:
                    self._step()
        finally:
            self._generation.close()

    def _listen(self) -> bool:
        """Take what has arrived, and wait for it where there is nothing to do; False: that was all."""
        if not self._generation.has_work:
            if self._is_stopping or (message := self._channel.receive()) is None:
                return False
            self._take(message)
        arrived = self._channel.poll()
        while arrived:
            self._take(arrived.popleft())
        return True

    def _take(self, message: ToWorker) -> None:
        if type(message) is Run:
            for request in message.jobs:
                self._begin(request)
        elif type(message) is Cancel:
            for job_id in message.job_ids:
                if self._replier.drop(job_id):
                    self._forget(job_id)
            self._replier.forget_cancelled(message.job_ids)
        elif type(message) is Stop:
            self._is_stopping = True

    def _begin(self, request: Request) -> None:
        if request.kind not in ("predict", "generate") or request.envelope:
            self._runner.run(Run([request]))  # alone, between two steps
            return
        self._replier.open([request])
        row = self._runner.read(request)
        if row is None:
            return
        self._runner.context.begin([request], [types_of(row)])
        try:
            self._generation.join(request, row)
        except Exception as error:
            self._replier.fail([request], error)
        else:
            self._joined[request.job_id] = (request, time.perf_counter())

    def _step(self) -> None:
        """One step, and its parts on their way."""
        try:
            made = self._generation.step()
        except Exception as error:
            self._fail_all(error)
            return
        self._num_failures = 0
        self._send(made)

    def _send(self, made: Sequence[Part | tuple[int, Exception]]) -> None:
        now = time.perf_counter()
        if made:
            self._replier.send_made(self._runner.context, [self._to_message(one, now) for one in made])
            self._said_at = now
        elif now - self._said_at > SIGN_OF_LIFE_S:
            self._channel.send([Samples([])])
            self._said_at = now

    def _to_message(self, made: Part | tuple[int, Exception], now: float) -> Part | Failed:
        if isinstance(made, tuple):
            job_id, error = made
            self._joined.pop(job_id, None)
            return to_failed([job_id], error)
        if made.last and made.job_id in self._joined:
            _, began = self._joined.pop(made.job_id)
            return replace(made, handler_s=now - began)
        return made

    def _fail_all(self, error: Exception) -> None:
        """What is kept of one job cannot be trusted when a step has failed: all are told, and the next ones begin anew.

        Steps that go on failing end the process: whatever is broken is not in the requests.
        """
        logger.exception("a step of the generation failed, with %d requests in it", len(self._joined))
        self._replier.fail([request for request, _ in self._joined.values()], error)
        for job_id in [*self._joined]:
            self._forget(job_id)
        self._num_failures += 1
        if self._num_failures >= FAILURES or self._generation.has_work:
            raise error

    def _forget(self, job_id: int) -> None:
        if self._joined.pop(job_id, None) is not None:
            self._generation.cancel(job_id)
