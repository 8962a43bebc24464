"""GptGeneration: jobs join the engine, and each of its steps becomes parts of their replies."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flambeau.errors import BadRequest, PredictionException
from flambeau.handlers.generation.progress import Progress, encode_step, read_progress
from flambeau.handlers.generation.replies import Made, Reply
from flambeau.handlers.generation.request_reader import Prompted
from flambeau.llm.core.outputs import Completion, Output, SequenceCounts
from flambeau.llm.engine import Engine
from flambeau.llm.errors import LLMError
from flambeau.llm.input_processor import SEED_STRIDE
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.messages import Part, Request

PROMPT_STRIDE = 0xD1B54A32D192ED03  # apart from each other: the prompts of one request without a seed of its own

Read = Callable[[Request, Mapping[str, Any], Progress | None], Prompted]
Ended = tuple[int, Exception]


@dataclass(slots=True)
class RunningJob:
    """One job in the engine; it is over when all its choices are."""

    request: Request
    reply: Reply
    num_left: int
    seed: int | None  # to be told with the first part; None: nobody goes on with this reply
    keeps_state: bool
    began: float
    names: list[str] = field(default_factory=list)  # what the engine knows it by
    first_at: float = 0.0
    has_sent: bool = False
    unsaid: dict[int, list[int]] = field(default_factory=dict)  # tokens since the last part, by choice
    finished: set[int] = field(default_factory=set)
    counts: list[SequenceCounts] = field(default_factory=list)

    def note(self, made: Sequence[Made], now: float) -> None:
        """Take note of what a step has made."""
        self.first_at = self.first_at or now
        for one in made:
            if self.keeps_state:
                self.unsaid.setdefault(one.index, []).extend(one.output.token_ids)
            if one.output.finish_reason:
                self.num_left -= 1
                self.finished.add(one.index)
                if one.output.counts is not None:
                    self.counts.append(one.output.counts)

    def take_state(self) -> bytes:
        """What goes with a part, so that another worker can go on after it."""
        if not self.keeps_state:
            return b""
        state = encode_step(self.unsaid, self.finished, self.seed)
        self.unsaid, self.seed = {}, None
        return state


@dataclass(slots=True)
class Gathering:
    """Completions that somebody waits for within a call."""

    completions: list[Completion]
    num_left: int
    on_tokens: Callable[[int, list[int]], object] | None

    def add(self, index: int, output: Output) -> None:
        """Append what a step has made."""
        self.completions[index].add(output)
        self.num_left -= output.finish_reason is not None
        if self.on_tokens is not None:
            self.on_tokens(index, output.token_ids)


class GptGeneration:
    """What the worker calls between steps and for them; see `flambeau.worker.generating.Generation`."""

    def __init__(
        self,
        engine: Engine,
        read: Read,
        *,
        abilities: Sequence[str],
        resume: bool,
        measure: Callable[[RunningJob, float], None],
    ) -> None:
        self.places = engine.config.max_num_seqs
        self.max_length = engine.max_length
        self.abilities = abilities
        self._engine = engine
        self._read = read
        self._resume = resume
        self._measure = measure
        self._jobs: dict[int, RunningJob] = {}
        self._owners: dict[str, tuple[RunningJob | Gathering, int]] = {}  # name → whose, and its first choice's index
        self._calls = itertools.count(1)
        self._waiting: list[Part | Ended] = []  # made within somebody else's call, and not sent yet
        self.outlet: Callable[[Sequence[Part | Ended]], None] | None = None  # where these are sent at once

    @property
    def has_work(self) -> bool:
        """Whether a step would make anything."""
        return bool(self._waiting) or self._engine.has_work

    # ---- jobs ----

    def join(self, request: Request, row: Mapping[str, Any]) -> None:
        """Let a job join, or go on where another worker stopped."""
        progress = read_progress(request.state) if request.state else None
        if request.state and progress is None:
            raise RuntimeError("the reply cannot go on: what the worker before said of it cannot be read")
        prompted = self._read(request, row, progress)
        seed = progress.seed if progress is not None else first_seed(prompted.params)
        keeps_state = self._resume and prompted.is_stream
        num_choices = len(prompted.prompts) * prompted.params.n
        job = RunningJob(
            request,
            prompted.reply,
            num_choices - (len(progress.finished) if progress else 0),
            seed if keeps_state and progress is None else None,
            keeps_state,
            time.perf_counter(),
            has_sent=progress is not None,
        )
        try:
            for place, ids in enumerate(prompted.prompts):
                self._add(job, place, ids, prompted.params, seed_of(place, prompted.params, seed), progress)
        except LLMError as error:
            self._forget(job)
            raise BadRequest(str(error)) from None
        except BaseException:
            self._forget(job)
            raise
        self._jobs[request.job_id] = job

    def _add(
        self,
        job: RunningJob,
        place: int,
        ids: list[int],
        params: SamplingParams,
        seed: int,
        progress: Progress | None,
    ) -> None:
        first = place * params.n
        if progress is None:
            name = self._own(job, f"{job.request.job_id}/{first}", first)
            self._engine.add(name, ids, params, seed=seed)
            return
        alone = replace(params, n=1)
        for choice in range(params.n):
            index = first + choice
            if index not in progress.finished:
                made = [progress.tokens.get(index, [])]
                name = self._own(job, f"{job.request.job_id}/{index}", index)
                self._engine.add(name, ids, alone, generated=made, seed=(seed + choice * SEED_STRIDE) % 2**64)

    def _own(self, owner: RunningJob, name: str, first_index: int) -> str:
        owner.names.append(name)
        self._owners[name] = (owner, first_index)
        return name

    def cancel(self, job_id: int) -> None:
        """Free at once what a job holds."""
        if (job := self._jobs.pop(job_id, None)) is not None:
            self._forget(job)

    def _forget(self, job: RunningJob) -> None:
        for name in job.names:
            self._owners.pop(name, None)
            self._engine.cancel(name)

    # ---- steps ----

    def step(self) -> list[Part | Ended]:
        """One step of the engine, as parts; what was made meanwhile goes first."""
        waiting, self._waiting = self._waiting, []
        return [*waiting, *self._advance()] if self._engine.has_work else waiting

    def _advance(self) -> list[Part | Ended]:
        made: dict[int, list[Made]] = {}
        for output in self._engine.step():
            owner, first = self._owners.get(output.request_id, (None, 0))
            if isinstance(owner, Gathering):
                owner.add(first + output.index, output)
            elif owner is not None:
                made.setdefault(owner.request.job_id, []).append(Made(first + output.index, output))
        now = time.perf_counter()
        parts = [self._part(self._jobs[job_id], of_job, now) for job_id, of_job in made.items()]
        return [part for part in parts if part is not None]

    def _part(self, job: RunningJob, made: Sequence[Made], now: float) -> Part | Ended | None:
        job.note(made, now)
        is_over = job.num_left == 0
        try:
            check_ends(one.output for one in made)
            body = job.reply.take(made, is_over=is_over)
        except Exception as error:  # an answer that cannot be written costs nobody else's
            self.cancel(job.request.job_id)
            return job.request.job_id, error
        if body is None:
            return None
        headers = None if job.has_sent else job.reply.headers or None
        job.has_sent = True
        if is_over:
            self.cancel(job.request.job_id)
            self._measure(job, now)
        return Part(job.request.job_id, body, is_over, headers=headers, state=b"" if is_over else job.take_state())

    # ---- within a call ----

    def complete(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        on_tokens: Callable[[int, list[int]], object] | None = None,
    ) -> list[Completion]:
        """One completion for each prompt; jobs that are in the engine too go on meanwhile."""
        gathering = Gathering([Completion() for _ in prompts], len(prompts), on_tokens)
        names = [f"call-{next(self._calls)}" for _ in prompts]
        try:
            for i, (name, ids) in enumerate(zip(names, prompts, strict=True)):
                self._owners[name] = (gathering, i)
                self._engine.add(name, ids, params[i])
            while gathering.num_left:
                made = self._advance()
                if self.outlet is None:
                    self._waiting += made
                else:
                    self.outlet(made)
        except LLMError as error:
            raise BadRequest(str(error)) from None
        finally:
            for name in names:
                self._owners.pop(name, None)
                self._engine.cancel(name)
        check_ends(gathering.completions)
        return gathering.completions

    # ---- the end ----

    def follow(self) -> None:
        """Rank 0 follows nobody; see `Following`."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop what runs beside the steps."""
        self._engine.close()


def check_ends(made: Iterable[Output | Completion]) -> None:
    """Raise where a choice has ended with an error: a text cut short must not pass for an answer."""
    for one in made:
        if one.finish_reason == "error":
            raise PredictionException(f"The model could not go on: {one.error}.", 500)


def first_seed(params: SamplingParams) -> int:
    """The seed a request's choices are drawn with: its own, or any."""
    return secrets.randbits(63) if params.seed is None else params.seed


def seed_of(place: int, params: SamplingParams, seed: int) -> int:
    """The seed of one of several prompts: a request's own seed gives each what it would get alone."""
    return seed if params.seed is not None else (seed + place * PROMPT_STRIDE) % 2**64
