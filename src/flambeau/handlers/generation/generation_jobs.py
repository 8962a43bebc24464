"""GptGeneration: jobs join the engine, and the outputs of its steps become parts of their replies."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from flambeau.errors import BadRequest, PredictionException
from flambeau.handlers.generation.chat_images import to_file
from flambeau.handlers.generation.reply_formats import ChoiceOutput, ReplyFormat
from flambeau.handlers.generation.request_reader import Prompted, ResumeState, encode_step, read_state, to_bad_request
from flambeau.llm.core.outputs import Completion, Output, SequenceCounts
from flambeau.llm.core.sequence import EncodedImage
from flambeau.llm.engine import Engine, EngineState
from flambeau.llm.errors import LLMError
from flambeau.llm.input_processor import SEED_STRIDE, new_seed
from flambeau.llm.sampling_params import SamplingParams
from flambeau.metrics.definitions import MetricTypes
from flambeau.wire.generation import Adapter, decode_adapter_change
from flambeau.wire.messages import TOKEN_GAPS, EngineReport, GenerationWork, Part, Request, Shared, Work

LONG_BYTES = 16 << 10  # of a request that is read beside the steps: a few milliseconds
READ_WAIT_S = 0.02  # an idle engine waits so long for a request that is being read, then for messages
PROMPT_STRIDE = 0xD1B54A32D192ED03  # between the seeds of several prompts in a request without a seed of its own

Read = Callable[[Request, Mapping[str, Any], ResumeState | None], Prompted]
StepResult = Part | tuple[int, Exception]  # a part, or a job that failed alone


@dataclass(slots=True)
class GenerationJob:
    """A job in the engine; it ends with the last of its choices."""

    request: Request
    reply: ReplyFormat
    num_left: int  # choices that are not finished
    seed: int | None  # to send with the first part; None: it was sent, or the reply cannot be resumed
    keeps_state: bool
    began: float
    names: list[str] = field(default_factory=list)  # its requests in the engine
    first_at: float = 0.0  # when the first tokens came
    last_at: float = 0.0
    has_sent: bool = False
    unsent: dict[int, list[int]] = field(default_factory=dict)  # choice → tokens since the last part
    finished: set[int] = field(default_factory=set)
    counts: list[SequenceCounts] = field(default_factory=list)

    def add(self, outputs: Sequence[ChoiceOutput], now: float, gaps: TokenGaps) -> None:
        """Note what a step has generated, and how long after the step before."""
        gap_s = now - self.last_at if self.last_at else None
        self.first_at, self.last_at = self.first_at or now, now
        for choice in outputs:
            output = choice.output
            if gap_s is not None and output.token_ids:
                gaps.add(gap_s, len(output.token_ids))
            if self.keeps_state:
                self.unsent.setdefault(choice.index, []).extend(output.token_ids)
            if output.finish_reason:
                self.num_left -= 1
                self.finished.add(choice.index)
                if output.counts is not None:
                    self.counts.append(output.counts)

    def work(self, now: float) -> Work:
        """What the engine did for the job, once it is over."""
        counts = self.counts
        return Work(
            self.began,
            now,
            0.0,
            now - self.began,
            generation=GenerationWork(
                self.first_at - self.began,
                sum(each.num_prompt for each in counts if each.is_first),
                sum(each.num_cached for each in counts if each.is_first),
                sum(each.num_generated for each in counts),
                sum(each.num_drafted for each in counts),
                sum(each.num_accepted for each in counts),
                sum(each.num_preempted for each in counts),
            ),
        )

    def take_state(self) -> bytes:
        """The state to send with the next part of a reply that can be resumed."""
        state = encode_step(self.unsent, self.finished, self.seed)
        self.unsent, self.seed = {}, None
        return state


class TokenGaps:
    """Counts the times between the tokens of each job, and the engine's steps, since the last report."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TOKEN_GAPS) + 1)
        self.seconds = 0.0
        self.num_steps = 0
        self._num_preempted = self._num_saved = self._num_restored = 0  # at the last report

    def add(self, gap_s: float, num_tokens: int) -> None:
        """Count the tokens of one step; those that arrive together share the time since the step before."""
        self.counts[bisect_left(TOKEN_GAPS, gap_s / num_tokens)] += num_tokens
        self.seconds += gap_s

    def report(self, state: EngineState) -> EngineReport:
        counts, seconds, num_steps = self.counts, self.seconds, self.num_steps
        num_preempted = state.num_preempted - self._num_preempted
        self.counts, self.seconds, self.num_steps = [0] * len(counts), 0.0, 0
        self._num_preempted = state.num_preempted
        num_saved = state.num_blocks_saved - self._num_saved
        num_restored = state.num_blocks_restored - self._num_restored
        self._num_saved, self._num_restored = state.num_blocks_saved, state.num_blocks_restored
        return EngineReport(
            state.num_running,
            state.num_waiting,
            state.num_blocks,
            state.num_blocks_used,
            num_preempted,
            num_steps,
            counts,
            seconds,
            num_saved,
            num_restored,
        )


@dataclass(slots=True)
class PendingCompletions:
    """The completions that a call of `GptGeneration.complete` waits for."""

    completions: list[Completion]
    num_left: int
    on_tokens: Callable[[int, list[int]], object] | None

    def add(self, index: int, output: Output) -> None:
        self.completions[index].add(output)
        self.num_left -= output.finish_reason is not None
        if self.on_tokens is not None:
            self.on_tokens(index, output.token_ids)


class ReadThread:
    """Calls functions in a thread, one after another. Tenants take turns."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Callable[[], Any], Future[Any]]] = []  # turn, order of arrival, …
        self._serials = itertools.count()
        self._num_left = 0  # calls that wait or run
        self._turn = 0  # of the call that began last
        self._last_turns: dict[str, int] = {}  # of each tenant's last call

    def submit(self, call: Callable[[], Any], tenant: str) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if not self._num_left:
                self._last_turns.clear()
            self._num_left += 1
            turn = max(self._turn, self._last_turns.get(tenant, -1) + 1)
            self._last_turns[tenant] = turn
            heapq.heappush(self._waiting, (turn, next(self._serials), call, future))
        self._executor.submit(self._call_next)
        return future

    def _call_next(self) -> None:
        with self._lock:
            self._turn, _, call, future = heapq.heappop(self._waiting)
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            self._num_left -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class BackgroundReads:
    """Reads requests in threads, beside the steps.

    Tokenizing a long prompt takes as long as many steps; tokenizers release Python's lock meanwhile. While one is
    read, short ones have a thread of their own: the thread of the steps never waits for a tokenizer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[str, ReadThread] = {}  # made when they are needed
        self._reads: dict[int, tuple[Future[Any], Callable[[Any], StepResult | None], threading.Event]] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._reads)

    def is_for(self, size_bytes: int) -> bool:
        return size_bytes >= LONG_BYTES or bool(self._reads)

    def submit(
        self,
        job_id: int,
        read: Callable[[], Any],
        finish: Callable[[Any], StepResult | None],
        cancelled: threading.Event | None = None,
        *,
        size_bytes: int = LONG_BYTES,
        tenant: str = "",
    ) -> None:
        """Call `read` in a thread, and then `finish` with its result between two steps.

        `cancelled` is set when the result is no longer needed.
        """
        name = self._name if size_bytes >= LONG_BYTES else f"{self._name}-short"
        if name not in self._threads:
            self._threads[name] = ReadThread(name)
        future = self._threads[name].submit(read, tenant)
        self._reads[job_id] = (future, finish, cancelled or threading.Event())

    def forget(self, job_id: int) -> None:
        """Drop a job that was cancelled."""
        if (found := self._reads.pop(job_id, None)) is not None:
            found[0].cancel()
            found[2].set()

    def finish(self, wait_s: float) -> list[StepResult]:
        """Finish the jobs that are read; without any, wait a moment for one."""
        wait([future for future, _, _ in self._reads.values()], wait_s, FIRST_COMPLETED)
        results: list[StepResult] = []
        for job_id, (future, finish, _) in [*self._reads.items()]:
            if not future.done():
                continue
            del self._reads[job_id]
            try:
                result = finish(future.result())
            except Exception as error:
                results.append((job_id, error))
            else:
                results += [] if result is None else [result]
        return results

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()


def size_of(request: Request) -> int:
    body = request.body
    return body.size_bytes if isinstance(body, Shared) else len(body)


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
        self._preparations = BackgroundReads("prepare")  # of images and grammars
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
        if is_movable and self._reads.is_for(size_of(request)):
            self._reads.submit(
                request.job_id,
                partial(self._read, request, row, state),
                lambda prompted: self._add_read(request, prompted, state, began),
                size_bytes=size_of(request),
                tenant=request.tenant,
            )
        else:
            self._add_read(request, self._read(request, row, state), state, began)

    def _add_read(self, request: Request, prompted: Prompted, state: ResumeState | None, began: float) -> None:
        """Add a job, or first compile its grammar and read its images, beside the steps."""
        if not prompted.images and self._engine.has_grammar(prompted.params, prompted.turn):
            self._add_job(request, prompted, (), state, began)
            return
        cancelled = threading.Event()
        self._preparations.submit(
            request.job_id,
            partial(self._prepare, prompted, cancelled),
            lambda images: self._add_job(request, prompted, images, state, began),
            cancelled,
            tenant=request.tenant,
        )

    def _prepare(self, prompted: Prompted, cancelled: threading.Event) -> list[EncodedImage]:
        try:
            self._engine.compile_grammar(prompted.params, prompted.turn)
            if not prompted.images:
                return []
            return self._engine.encode_images([to_file(image) for image in prompted.images], cancelled.is_set)
        except LLMError as error:
            raise to_bad_request(error, prompted.prompt_name) from None

    def _add_job(
        self,
        request: Request,
        prompted: Prompted,
        images: Sequence[EncodedImage],
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
                self._add(job, place, ids, prompted, images, seed_of(place, prompted.params, seed), state, adapter)
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
        images: Sequence[EncodedImage],
        seed: int,
        state: ResumeState | None,
        adapter: str,
    ) -> None:
        params, turn = prompted.params, prompted.turn
        first = place * params.n
        if state is None:
            name = self._own(job, f"{job.request.job_id}/{first}", first)
            self._engine.add(
                name,
                ids,
                params,
                seed=seed,
                adapter=adapter,
                turn=turn,
                tenant=job.request.tenant,
                scores_prompt=job.reply.scores_prompt,
                images=images,
            )
            return
        alone = replace(params, n=1)
        for choice in range(params.n):
            index = first + choice
            if index not in state.finished:
                generated = [state.tokens.get(index, [])]
                name = self._own(job, f"{job.request.job_id}/{index}", index)
                own_seed = (seed + choice * SEED_STRIDE) % 2**64
                self._engine.add(
                    name,
                    ids,
                    alone,
                    generated=generated,
                    seed=own_seed,
                    adapter=adapter,
                    turn=turn,
                    tenant=job.request.tenant,
                    images=images,
                )

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
        if not self._reads.is_for(len(body)):
            return self._tokenize(body)
        self._reads.submit(
            request.job_id,
            partial(self._tokenize, body),
            partial(Part, request.job_id),
            size_bytes=len(body),
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
        if output.finish_reason == "error":
            raise PredictionException(f"The model could not go on: {output.error}.", 500)


def first_seed(params: SamplingParams) -> int:
    return new_seed() if params.seed is None else params.seed


def seed_of(place: int, params: SamplingParams, seed: int) -> int:
    """The seed of one of several prompts; with a seed of the request, each prompt gets what it would get alone."""
    return seed if params.seed is not None else (seed + place * PROMPT_STRIDE) % 2**64


class HandlerMetrics(Protocol):
    """The part of `context.metrics` that GenerationMetrics needs."""

    def set_request_ids(self, request_ids: Mapping[int, str] | None) -> None: ...

    def add_counter(self, name: str, value: float) -> None: ...

    def add_time(self, name: str, value: float) -> None: ...

    def add_percent(self, name: str, value: float) -> None: ...

    def add_metric(self, name: str, value: float, unit: str, *, metric_type: Any) -> None: ...


class GenerationMetrics:
    """Measures each finished job: tokens, time to the first one, tokens per second, and accepted drafts."""

    def __init__(self, metrics: HandlerMetrics) -> None:
        self._metrics = metrics
        self._gauge = MetricTypes.GAUGE

    def __call__(self, job: GenerationJob, now: float) -> None:
        metrics = self._metrics
        metrics.set_request_ids({0: job.request.request_id})
        made = sum(counts.num_generated for counts in job.counts)
        drafted = sum(counts.num_drafted for counts in job.counts)
        metrics.add_counter("PromptTokens", sum(counts.num_prompt for counts in job.counts))
        metrics.add_counter("CachedPromptTokens", sum(counts.num_cached for counts in job.counts))
        metrics.add_counter("GeneratedTokens", made)
        metrics.add_time("TimeToFirstToken", round((job.first_at - job.began) * 1000, 3))
        if now > job.first_at and made > 1:
            per_second = round((made - 1) / (now - job.first_at), 3)
            metrics.add_metric("TokensPerSecond", per_second, "count", metric_type=self._gauge)
        if drafted:
            accepted = sum(counts.num_accepted for counts in job.counts)
            metrics.add_counter("DraftedTokens", drafted)
            metrics.add_counter("AcceptedTokens", accepted)
            metrics.add_percent("DraftAcceptance", round(100 * accepted / drafted, 2))
