"""GenerationJob: what the engine has done for a job; TokenGaps and GenerationMetrics: what is measured of all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flambeau.handlers.generation.reply_formats import ChoiceOutput, ReplyFormat
from flambeau.handlers.generation.request_reader import encode_step
from flambeau.llm.core.outputs import Completion, Output, SequenceCounts
from flambeau.llm.engine import EngineState
from flambeau.metrics.definitions import MetricTypes
from flambeau.wire.messages import TOKEN_GAPS, EngineReport, GenerationWork, Request, Work


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
    finish_reasons: list[str] = field(default_factory=list)

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
                self.finish_reasons.append(output.finish_reason)
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
                self.finish_reasons,
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
