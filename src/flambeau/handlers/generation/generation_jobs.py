"""GptGeneration: jobs join the engine, and the outputs of its steps become parts of their replies."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flambeau.errors import BadRequest, PredictionException
from flambeau.handlers.generation.background_reads import LONG_BYTES, BackgroundReads, StepResult
from flambeau.handlers.generation.job_progress import GenerationJob, PendingCompletions, TokenGaps
from flambeau.handlers.generation.media_files import to_file
from flambeau.handlers.generation.reply_formats import ChoiceOutput
from flambeau.handlers.generation.request_reader import Prompted, ResumeState, read_state, to_bad_request
from flambeau.llm.core.outputs import Completion, Output
from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.engine import Engine
from flambeau.llm.errors import LLMError
from flambeau.llm.input_processor import SEED_STRIDE, new_seed
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Adapter, decode_adapter_change
from flambeau.wire.messages import EngineReport, Part, Request, Shared

READ_WAIT_S = 0.02  # an idle engine waits so long for a request that is being read, then for messages
CLIPS = (b"audio", b"sound", b"video")
PROMPT_STRIDE = 0xD1B54A32D192ED03  # between the seeds of several prompts in a request without a seed of its own

Read = Callable[[Request, Mapping[str, Any], ResumeState | None], Prompted]


def size_of(request: Request) -> int:
    body = request.body
    return body.size_bytes if isinstance(body, Shared) else len(body)


def may_have_clips(body: bytes | bytearray | Shared) -> bool:
    """Whether a request must be read apart from texts, however short: few bytes can hold a long sound or video.

    The places of such files, and their kinds in a short request, are at its beginning.
    """
    if isinstance(body, Shared):
        return False
    begin = bytes(memoryview(body)[:LONG_BYTES])
    return any(kind in begin for kind in CLIPS)


def cannot_tokenize(body: bytes | bytearray) -> bytes:
    """The default for `tokenize`."""
    raise BadRequest("this model does not tokenize texts")


class GptGeneration:
    """The jobs of an engine, as the worker runs them; see `flambeau.worker.generation.Generation`."""

    def __init__(
        self,
        engine: Engine,
        read: Read,
        *,
        tokenize: Callable[[bytes | bytearray], bytes] = cannot_tokenize,
        abilities: Sequence[str],
        resume: bool,
        on_finished: Callable[[GenerationJob, float], None],
        has_own_read: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_own_read`: whether `read` runs code of the user for predictions, which must not run in a thread."""
        self.places = engine.config.max_num_seqs
        self.max_length = engine.max_length
        self.adapters = engine.adapters  # those of the model's settings
        self.abilities = abilities
        self.on_results: Callable[[Sequence[StepResult]], None] | None = None
        self._engine = engine
        self._read = read
        self._tokenize = tokenize
        self._has_own_read = has_own_read
        self._resume = resume
        self._on_finished = on_finished
        self._reads = BackgroundReads("read")
        self._preparations = BackgroundReads("prepare")  # of files and grammars
        self._jobs: dict[int, GenerationJob] = {}
        self._gaps = TokenGaps()
        # name in the engine → its owner, and the index of its first choice
        self._owners: dict[str, tuple[GenerationJob | PendingCompletions, int]] = {}
        self._calls = itertools.count(1)
        self._unsent: list[StepResult] = []  # of jobs that advanced during `complete`, where `on_results` is None

    @property
    def has_work(self) -> bool:
        return bool(self._unsent) or self._is_reading or self._engine.has_work

    @property
    def _is_reading(self) -> bool:
        return self._reads.has_any or self._preparations.has_any

    # ---- jobs ----

    def join(self, request: Request, row: Mapping[str, Any]) -> None:
        """Add a job to the engine, or resume one of another worker. Raises BadRequest if the engine rejects it."""
        if request.kind == "adapter":
            self._unsent.append(self._change_adapter(request.job_id, row["body"]))
            return
        began = time.monotonic()
        state = read_state(request.state) if request.state else None
        if request.state and state is None:
            raise RuntimeError("the reply cannot be resumed: the state that the previous worker sent is not readable")
        is_movable = request.kind == "generate" or not self._has_own_read()
        has_clips = request.kind == "generate" and may_have_clips(request.body)
        if is_movable and (has_clips or self._reads.is_for(size_of(request))):
            self._reads.submit(
                request.job_id,
                partial(self._read, request, row, state),
                lambda prompted: self._add_read(request, prompted, state, began),
                lane=self._reads.lane_of(size_of(request), has_clips=has_clips),
                tenant=request.tenant,
            )
        else:
            self._add_read(request, self._read(request, row, state), state, began)

    def _add_read(self, request: Request, prompted: Prompted, state: ResumeState | None, began: float) -> None:
        """Add a job, or first compile its grammar and encode its files, beside the steps."""
        if not prompted.files.has_any and self._engine.has_grammar(prompted.params, prompted.turn):
            self._add_job(request, prompted, (), state, began)
            return
        cancelled = threading.Event()
        self._preparations.submit(
            request.job_id,
            partial(self._prepare, prompted, cancelled),
            lambda media: self._add_job(request, prompted, media, state, began),
            cancelled,
            lane="files" if prompted.files.has_any else "long",
            tenant=request.tenant,
        )

    def _prepare(self, prompted: Prompted, cancelled: threading.Event) -> list[EncodedMedia]:
        try:
            self._engine.compile_grammar(prompted.params, prompted.turn)
            files = prompted.files
            found: list[EncodedMedia] = []
            if files.images:
                found += self._engine.encode_images([to_file(image) for image in files.images], cancelled.is_set)
            if files.sounds:
                found += self._engine.encode_sounds(files.sounds, cancelled.is_set)
            return found
        except LLMError as error:
            raise to_bad_request(error, prompted.prompt_name) from None

    def _add_job(
        self,
        request: Request,
        prompted: Prompted,
        media: Sequence[EncodedMedia],
        state: ResumeState | None,
        began: float,
    ) -> None:
        seed = state.seed if state is not None else first_seed(prompted.params)
        keeps_state = self._resume and prompted.is_stream
        num_choices = len(prompted.prompts) * prompted.params.n
        job = GenerationJob(
            request,
            prompted.reply,
            num_choices - (len(state.finished) if state else 0),
            seed if keeps_state and state is None else None,
            keeps_state,
            began,
            has_sent=state is not None,
        )
        try:
            adapter = self._loaded(prompted.adapter)
            for place, ids in enumerate(prompted.prompts):
                self._add(job, place, ids, prompted, media, seed_of(place, prompted.params, seed), state, adapter)
        except LLMError as error:
            self._remove(job)
            raise to_bad_request(error, prompted.prompt_name) from None
        except BaseException:
            self._remove(job)
            raise
        self._jobs[request.job_id] = job

    def _add(
        self,
        job: GenerationJob,
        place: int,
        ids: list[int],
        prompted: Prompted,
        media: Sequence[EncodedMedia],
        seed: int,
        state: ResumeState | None,
        adapter: str,
    ) -> None:
        params = prompted.params
        first = place * params.n
        shared: dict[str, Any] = {
            "adapter": adapter,
            "turn": prompted.turn,
            "tenant": job.request.tenant,
            "media": media,
            "cache_salt": prompted.cache_salt,
        }
        if state is None:
            name = self._own(job, f"{job.request.job_id}/{first}", first)
            self._engine.add(name, ids, params, seed=seed, scores_prompt=job.reply.scores_prompt, **shared)
            return
        alone = replace(params, n=1)
        for choice in range(params.n):
            index = first + choice
            if index not in state.finished:
                name = self._own(job, f"{job.request.job_id}/{index}", index)
                generated = [state.tokens.get(index, [])]
                own_seed = (seed + choice * SEED_STRIDE) % 2**64
                self._engine.add(name, ids, alone, generated=generated, seed=own_seed, **shared)

    def _loaded(self, adapter: Adapter | None) -> str:
        """The adapter's name in the engine; loaded now if this worker has started after it was."""
        if adapter is None:
            return ""
        if adapter.serial and adapter.key not in self._engine.adapters:
            self._engine.load_adapter(adapter.key, adapter.path)
        return adapter.key

    def _change_adapter(self, job_id: int, body: bytes | bytearray) -> Part:
        """Load or unload an adapter; it may have happened before. Running jobs wait meanwhile."""
        try:
            change = decode_adapter_change(body)
            if change.loads:
                self._loaded(change.adapter)
            elif change.adapter.key in self._engine.adapters:
                self._engine.unload_adapter(change.adapter.key)
        except (LLMError, ValueError) as error:
            raise BadRequest(str(error)) from None
        return Part(job_id, b"")

    def _own(self, job: GenerationJob, name: str, first_index: int) -> str:
        job.names.append(name)
        self._owners[name] = (job, first_index)
        return name

    def tokenize(self, request: Request, body: bytes | bytearray) -> bytes | None:
        """Answer a job of kind `tokenize`, which needs no place in the engine; None: with a later step."""
        has_clips = may_have_clips(body)
        if not has_clips and not self._reads.is_for(len(body)):
            return self._tokenize(body)
        self._reads.submit(
            request.job_id,
            partial(self._tokenize, body),
            partial(Part, request.job_id),
            lane=self._reads.lane_of(len(body), has_clips=has_clips),
            tenant=request.tenant,
        )
        return None

    def cancel(self, job_id: int) -> None:
        self._reads.forget(job_id)
        self._preparations.forget(job_id)
        if (job := self._jobs.pop(job_id, None)) is not None:
            self._remove(job)

    def _remove(self, job: GenerationJob) -> None:
        for name in job.names:
            self._owners.pop(name, None)
            self._engine.cancel(name)

    # ---- steps ----

    def step(self) -> list[StepResult]:
        unsent, self._unsent = self._unsent, []
        for reads in (self._reads, self._preparations):
            if reads.has_any:
                unsent += reads.finish(wait_s=0.0 if self._engine.has_work else READ_WAIT_S)
        return [*unsent, *self._advance()] if self._engine.has_work else unsent

    def _advance(self) -> list[StepResult]:
        outputs: dict[int, list[ChoiceOutput]] = {}
        find = self._owners.get
        for output in self._engine.step():
            owner, first = find(output.request_id, (None, 0))
            if isinstance(owner, GenerationJob):
                outputs.setdefault(owner.request.job_id, []).append(ChoiceOutput(first + output.index, output))
            elif owner is not None:
                owner.add(first + output.index, output)
        now = time.monotonic()
        self._gaps.num_steps += 1
        parts = [self._part(self._jobs[job_id], of_job, now) for job_id, of_job in outputs.items()]
        return [part for part in parts if part is not None]

    def _part(self, job: GenerationJob, outputs: Sequence[ChoiceOutput], now: float) -> StepResult | None:
        num_finished = len(job.finished)
        job.add(outputs, now, self._gaps)
        is_over = job.num_left == 0
        try:
            if len(job.finished) > num_finished:
                check_finish_reasons(choice.output for choice in outputs)
            body = job.reply.take(outputs, is_over=is_over)
        except Exception as error:  # a reply that cannot be formatted fails its own job only
            self.cancel(job.request.job_id)
            return job.request.job_id, error
        if body is None:
            return None
        headers = None if job.has_sent else job.reply.headers or None
        job.has_sent = True
        if is_over:
            self.cancel(job.request.job_id)
            self._on_finished(job, now)
            return Part(job.request.job_id, body, headers=headers, work=job.work(now))
        state = job.take_state() if job.keeps_state else b""
        return Part(job.request.job_id, body, False, headers=headers, state=state)

    # ---- within a call ----

    def complete(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        on_tokens: Callable[[int, list[int]], object] | None = None,
    ) -> list[Completion]:
        """Generate one completion for each prompt before returning; jobs in the engine advance meanwhile."""
        pending = PendingCompletions([Completion() for _ in prompts], len(prompts), on_tokens)
        names = [f"call-{next(self._calls)}" for _ in prompts]
        try:
            for i, (name, ids) in enumerate(zip(names, prompts, strict=True)):
                self._owners[name] = (pending, i)
                self._engine.add(name, ids, params[i])
            while pending.num_left:
                results = self._advance()
                if self.on_results is None:
                    self._unsent += results
                else:
                    self.on_results(results)
        except LLMError as error:
            raise to_bad_request(error) from None
        finally:
            for name in names:
                self._owners.pop(name, None)
                self._engine.cancel(name)
        check_finish_reasons(pending.completions)
        return pending.completions

    # ---- life cycle ----

    def report(self) -> EngineReport:
        """The engine's load, with what was counted since the last call."""
        return self._gaps.report(self._engine.state)

    def follow(self) -> None:
        """Not on rank 0; see `Follower`."""
        raise NotImplementedError

    def close(self) -> None:
        self._reads.close()
        self._preparations.close()
        self._engine.close()


def check_finish_reasons(outputs: Iterable[Output | Completion]) -> None:
    """Raise if a choice ended with an error: a text cut short must not pass for a reply."""
    for output in outputs:
        if output.is_contradiction:
            raise BadRequest(f"the text could not go on: {output.error}")
        if output.finish_reason == "error":
            raise PredictionException(f"The model could not go on: {output.error}.", 500)


def first_seed(params: SamplingParams) -> int:
    return new_seed() if params.seed is None else params.seed


def seed_of(place: int, params: SamplingParams, seed: int) -> int:
    """The seed of one of several prompts; with a seed of the request, each prompt gets what it would get alone."""
    return seed if params.seed is not None else (seed + place * PROMPT_STRIDE) % 2**64
