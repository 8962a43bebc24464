"""Speculation in the engine: the tokens without it, whatever ends, interrupts or shares a sequence."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.draft import DraftModel
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from flambeau.llm.text.tokenizer import load_tokenizer
from support.cpu_kernels import need_cpu_kernels
from support.statistics import chi_square_p
from support.tiny_models import ARCH, tiny_draft, tiny_engine, tiny_model
from support.tokenizer_files import write_sentencepiece

KINDS = ["draft", "lookup"]
MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "speculate": False},
    {"seed": 1},
    {"seed": 2, "top_k": 10, "presence_penalty": 1.0},
    {"seed": 3, "top_p": 0.8, "temperature": 0.5, "min_tokens": 10},
    {"seed": 4, "min_p": 0.05, "logit_bias": {5: 3.0}},
    {"temperature": 0.0, "logprobs": 2},
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def draft(model):
    return tiny_draft(model)


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


def engine_for(kind, model, draft, **options):
    return tiny_engine(model, draft=draft if kind == "draft" else None, speculation=kind, **options)


def some_prompts(number, seed=1):
    """Half of them repeat themselves, so that there is something to look up."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(ARCH.vocab_size) for _ in range(rng.randrange(1, 30))] for _ in range(number)]
    return [prompt * (1 + i % 2) for i, prompt in enumerate(prompts)]


def run(engine, prompts, params):
    """The last output of every request, with all its tokens and log-probabilities."""
    made, infos, ends = [[] for _ in prompts], [[] for _ in prompts], {}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params[i % len(params)])
    while engine.has_work:
        for output in engine.step():
            made[int(output.request_id)] += output.token_ids
            infos[int(output.request_id)] += output.tokens or []
            if output.finish_reason:
                ends[int(output.request_id)] = output
    assert engine.state.num_blocks_used == 0
    return made, [ends[i] for i in range(len(prompts))], infos


@pytest.fixture(scope="module")
def plain(model):
    params = [SamplingParams(max_tokens=25, **each) for each in MIXED]
    return params, *run(tiny_engine(model), some_prompts(16), params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculate_k": 1},
        {"max_num_seqs": 3, "speculate_k": 7},
        {"num_blocks": 40, "prefix_cache": False},
        {"max_step_tokens": 100, "speculate_k": 2},
    ],
    ids=["roomy", "one ahead", "three at a time", "preempted", "in chunks"],
)
def test_the_tokens_are_those_without_it(model, draft, plain, kind, options):
    params, tokens, ends, infos = plain
    engine = engine_for(kind, model, draft, **options)
    made, made_ends, made_infos = run(engine, some_prompts(16), params)
    assert made == tokens
    assert [end.finish_reason for end in made_ends] == [end.finish_reason for end in ends]
    assert (engine.state.num_preempted > 0) == ("num_blocks" in options)
    assert sum(end.counts.num_accepted for end in made_ends) > 0
    for each, expected in zip(made_infos, infos, strict=True):
        assert [info.id for info in each] == [info.id for info in expected]
        assert [info.logprob for info in each] == pytest.approx([info.logprob for info in expected], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_without_it_with_the_kernels_too(kind):
    """Those serve certain head sizes; some sequences have fewer proposals than others."""
    model = tiny_model(replace(ARCH, head_size=16, hidden_size=64))
    params = [SamplingParams(max_tokens=25, **each) for each in MIXED]
    made, ends, _ = run(engine_for(kind, model, tiny_draft(model), max_model_len=60), some_prompts(16), params)
    expected, *_ = run(tiny_engine(model, max_model_len=60), some_prompts(16), params)
    assert made == expected
    assert sum(end.counts.num_accepted for end in ends) > 0


def with_whole_steps(model, draft=None, **options):
    """An engine whose steps are computed by the kernels in one call each."""
    need_cpu_kernels()
    forwards = [CpuBackend(each, KVCache(each.arch, 200, 4)) for each in (model, draft) if each is not None]
    for forward in forwards:
        assert forward.wait_until_compiled()
        assert forward.greedy is not None
    proposing = DraftModel(forwards[1], draft.arch.max_length) if draft is not None else None
    config = EngineConfig(block_size=4, max_model_len=60, **options)
    return Engine(model.arch, forwards[0], num_blocks=200, config=config, draft=proposing)


@pytest.mark.timeout(300)  # the kernels may have to be built
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"min_tokens": 9}, {"repetition_penalty": 1.3}])
def test_greedy_tokens_are_those_without_it_where_the_kernels_choose_them(extra):
    """With settings of somebody that they do not know, the sampler chooses for the whole step."""
    model = tiny_model(replace(ARCH, head_size=16, hidden_size=64))
    asked = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (25, 7, 18, 2)]
    params = [*asked, replace(asked[0], **extra)]
    made, ends, infos = run(with_whole_steps(model, tiny_draft(model), speculate_k=3), some_prompts(16), params)
    expected, _, expected_infos = run(tiny_engine(model, max_model_len=60), some_prompts(16), params)
    assert made == expected
    assert made == run(with_whole_steps(model), some_prompts(16), params)[0]
    assert [len(each) for each in infos] == [len(each) for each in expected_infos]
    assert sum(end.counts.num_accepted for end in ends) > 0


def test_a_draft_that_was_left_behind_catches_up(model, draft, plain, monkeypatch):
    """Steps with and without speculation take turns, and prompts are known from an earlier request."""
    params, tokens, *_ = plain
    turns = itertools.cycle([5, 0, 0, 0, 5, 5])
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda *_: next(turns))
    engine = engine_for("draft", model, draft)
    for _ in range(2):
        made, ends, _ = run(engine, some_prompts(16), params)
        assert made == tokens
    assert ends[0].counts.num_cached > 0 or ends[1].counts.num_cached > 0


def test_a_draft_like_the_target_is_always_right(model):
    """After prompts, prefix hits and preemptions too: its cache is what it should be."""
    params = [SamplingParams(max_tokens=30, temperature=0.0), SamplingParams(max_tokens=30, seed=5)]
    for options in ({}, {"num_blocks": 36, "prefix_cache": False}, {"max_step_tokens": 100}):
        engine = tiny_engine(model, draft=model, speculate_k=4, **options)
        for _ in range(2):
            _, ends, _ = run(engine, some_prompts(8), params)
            assert [end.counts.num_accepted for end in ends] == [end.counts.num_drafted for end in ends]
            # Where blocks are short, nobody gives way for drafted tokens, and fewer are drafted.
            assert sum(end.counts.num_drafted for end in ends) >= (
                15 * len(ends) if "num_blocks" not in options else 15
            )


@pytest.mark.parametrize("kind", KINDS)
def test_max_tokens_may_come_in_the_middle(model, draft, plain, kind):
    _, tokens, *_ = plain
    for most in (1, 2, 4, 7):
        params = [SamplingParams(max_tokens=most, temperature=0.0)]
        made, ends, _ = run(engine_for(kind, model, draft), [some_prompts(16)[0]], params)
        assert made == [tokens[0][:most]]
        assert ends[0].finish_reason == "length"
        assert ends[0].counts.num_generated == most


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_context_may_come_in_the_middle(model, draft, kind):
    prompt = [3, 4, 5] * 8
    made, ends, _ = run(engine_for(kind, model, draft, max_model_len=31), [prompt], [SamplingParams(temperature=0.0)])
    expected, *_ = run(tiny_engine(model, max_model_len=31), [prompt], [SamplingParams(temperature=0.0)])
    assert made == expected
    assert len(made[0]) == 7
    assert ends[0].finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_token_may_come_in_the_middle(model, draft, plain, kind):
    _, tokens, *_ = plain
    for stop in [*dict.fromkeys(tokens[0])][1::4]:
        params = [SamplingParams(max_tokens=25, temperature=0.0, stop_token_ids=[stop])]
        made, ends, _ = run(engine_for(kind, model, draft), [some_prompts(16)[0]], params)
        assert made == [tokens[0][: tokens[0].index(stop) + 1]]
        assert ends[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_may_come_in_the_middle(kind, tmp_path):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    model = tiny_model(replace(ARCH, vocab_size=tokenizer.vocab_size))
    prompt = [5, 9, 12, 30] * 3

    def texts(engine, params):
        return [(c.text, c.token_ids, c.finish_reason) for c in engine.generate([prompt], params)]

    free = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    whole = tiny_engine(model, tokenizer=tokenizer).generate([prompt], free)[0].text
    assert len(whole) > 20
    for start in range(0, len(whole) - 4, len(whole) // 6):
        params = replace(free, stop=[whole[start : start + 4]])
        expected = texts(tiny_engine(model, tokenizer=tokenizer), params)
        assert expected[0][2] == "stop"
        assert texts(engine_for(kind, model, tiny_draft(model), tokenizer=tokenizer), params) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_the_distribution_is_the_targets(model, kind):
    """The second and third tokens of many answers, each one of four, so that rounds end at every place."""
    prompt, four = [1, 2, 3, 4, 4, 2, 1, 3], [1, 2, 3, 4]
    params = SamplingParams(max_tokens=3, top_k=4, temperature=2.0, n=128, logit_bias=dict.fromkeys(four, 100.0))
    engine = engine_for(kind, model, tiny_draft(model, change=0.1), max_num_seqs=64, max_step_tokens=1024)
    completions = [each for _ in range(6) for each in engine.generate([prompt], params)]
    assert 0 < sum(c.counts.num_accepted for c in completions) < sum(c.counts.num_drafted for c in completions)
    pairs = [tuple(completion.token_ids[1:]) for completion in completions]
    expected = dict.fromkeys(itertools.product(four, four), 0.0)
    for ids in itertools.product(four, repeat=3):
        expected[ids[1:]] += math.prod(share(model, [*prompt, *ids[:i]], ids[i]) for i in range(3))
    found = [pairs.count(pair) for pair in expected]
    assert sum(found) == len(pairs)
    assert chi_square_p(found, [len(pairs) * each for each in expected.values()]) > 1e-4


@functools.cache
def shares(model, ids):
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())[-1])
    return (logits[1:5].double() / 2.0).softmax(-1).tolist()


def share(model, ids, token):
    """How likely one of the four is to come next."""
    return shares(model, tuple(ids))[token - 1]


def test_a_draft_that_computes_nonsense_does_no_harm(model, plain):
    params, tokens, *_ = plain
    broken = tiny_draft(model)
    broken.lm_head.weight.fill_(math.nan)
    engine = tiny_engine(model, draft=broken)
    made, *_ = run(engine, some_prompts(16), params)
    assert made == tokens
    loose = engine.generate(some_prompts(4), SamplingParams(max_tokens=9))
    assert [(len(each.token_ids), each.finish_reason) for each in loose] == [(9, "length")] * 4


def test_a_text_that_repeats_itself_needs_no_draft(model, draft):
    """The draft is left behind meanwhile, and catches up when it is asked again."""
    params = [SamplingParams(max_tokens=90, temperature=0.0, logit_bias=dict.fromkeys((20, 21), 100.0))]
    prompts = [[20, 21] * 6, some_prompts(1)[0]]
    expected, *_ = run(tiny_engine(model), prompts, params)
    asked = []
    engine = tiny_engine(model, draft=draft)
    proposer = engine._executor._speculator._proposer
    propose = proposer._other.propose
    proposer._other.propose = lambda *given: asked.append(1) or propose(*given)
    made, ends, _ = run(engine, prompts, params)
    assert made == expected
    assert 0 < len(asked) < 30
    assert sum(end.counts.num_accepted for end in ends) > 60


def test_a_draft_with_a_shorter_context_stops_proposing_there(model):
    short = tiny_draft(tiny_model(replace(ARCH, max_length=40)), change=0.0)
    prompt = [[11, 12, 13, 14] * 4]
    params = [SamplingParams(max_tokens=60, temperature=0.0)]
    expected, *_ = run(tiny_engine(model), prompt, params)
    made, ends, _ = run(tiny_engine(model, draft=short), prompt, params)
    assert made == expected
    assert ends[0].counts.num_drafted <= 24


def test_a_draft_has_to_be_there():
    with pytest.raises(LLMError, match="needs a draft"):
        tiny_engine(speculation="draft")
