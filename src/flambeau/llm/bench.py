"""Measures an engine by itself: time to the first token, and tokens per second for several numbers of streams."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flambeau.llm.engine import Engine
from flambeau.llm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The result for one number of concurrent streams."""

    streams: int
    first_token_ms: float  # median, after all requests were added
    tokens_per_s: float  # all streams together, after the first token
    accepted: float | None  # share of the drafted tokens; None if none were drafted


def measure(engine: Engine, streams: Sequence[int], *, prompt_tokens: int, new_tokens: int) -> Iterator[BenchResult]:
    """One result per number of streams; prompts are random, so that no prefix is shared."""
    rng = random.Random(0)
    special = (
        {*engine.tokenizer.special_ids.values()} if engine.tokenizer else set()
    )  # some stand for images or sounds, which these prompts have not
    ids = [token for token in range(engine.arch.vocab_size) if token not in special]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for number in streams:
        prompts = [rng.choices(ids, k=prompt_tokens) for _ in range(number)]
        yield measure_once(engine, prompts, params)


def measure_once(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> BenchResult:
    """Run these prompts together until all are finished."""
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(f"bench-{i}", prompt, params)
    first: dict[str, float] = {}
    num_tokens = num_drafted = num_accepted = 0
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id in first:
                num_tokens += len(output.token_ids)
            first.setdefault(output.request_id, now)
            if output.counts is not None:
                num_drafted += output.counts.num_drafted
                num_accepted += output.counts.num_accepted
    seconds = time.perf_counter() - max(first.values())
    return BenchResult(
        streams=len(prompts),
        first_token_ms=1000 * (statistics.median(first.values()) - began),
        tokens_per_s=num_tokens / seconds if seconds else 0.0,
        accepted=num_accepted / num_drafted if num_drafted else None,
    )
