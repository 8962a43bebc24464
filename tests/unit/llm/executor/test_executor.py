"""The sampler in the engine: seeds, log-probabilities, and a network that computes nonsense."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.sampling_params import SamplingParams
from support.tiny_models import ARCH, tiny_engine, tiny_model

PROMPTS = [[random.Random(i).randrange(ARCH.vocab_size) for _ in range(5 + i)] for i in range(6)]


def run(engine, params: list[SamplingParams]) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in params]
    for i, each in enumerate(params):
        engine.add(str(i), PROMPTS[i], each)
    while engine.has_work:
        for output in engine.step():
            made[int(output.request_id)] += output.token_ids
    return made


def test_the_same_seed_gives_the_same_tokens_whatever_the_batch():
    settings = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"frequency_penalty": 1.0}, {"temperature": 0.0}]
    params = [SamplingParams(seed=i, max_tokens=20, **each) for i, each in enumerate(settings)]
    together = run(tiny_engine(), params)
    crowded = run(tiny_engine(num_blocks=14, prefix_cache=False, max_step_tokens=7), params)
    assert together == crowded
    for i, each in enumerate(params):
        engine = tiny_engine()
        assert engine.generate([PROMPTS[i]], each)[0].token_ids == together[i]


def test_without_a_seed_texts_differ_and_choices_do_too():
    params = SamplingParams(max_tokens=12, n=4, temperature=1.5)
    made = [tuple(choice.token_ids) for _ in range(2) for choice in tiny_engine().generate([PROMPTS[0]], params)]
    assert len(set(made)) == 8


def test_log_probabilities_are_those_of_the_whole_sequence():
    model = tiny_model()
    params = SamplingParams(max_tokens=6, logprobs=3, seed=1, temperature=1.3)
    plain = SamplingParams(max_tokens=6, seed=2)
    engine = tiny_engine(model)
    engine.add("asks", PROMPTS[1], params)
    engine.add("does not", PROMPTS[2], plain)
    infos = []
    while engine.has_work:
        for output in engine.step():
            assert (output.tokens is None) == (output.request_id == "does not")
            infos += output.tokens or []
    ids = [*PROMPTS[1], *(info.id for info in infos)]
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention()))
    expected = logits.log_softmax(-1)[len(PROMPTS[1]) - 1 :]
    for place, info in enumerate(infos):
        assert info.logprob == pytest.approx(expected[place, info.id].item(), abs=1e-4)
        assert [token for token, _ in info.top] == expected[place].topk(3).indices.tolist()


def test_a_network_that_computes_nonsense_ends_its_own_request_only():
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[PROMPTS[0][0]] = math.nan
    healthy = [prompt for prompt in PROMPTS[1:] if PROMPTS[0][0] not in prompt]
    engine = tiny_engine(model)
    engine.add("broken", PROMPTS[0], SamplingParams(max_tokens=5))
    for i, prompt in enumerate(healthy):
        engine.add(str(i), prompt, SamplingParams(max_tokens=5, temperature=0.0, logit_bias={PROMPTS[0][0]: -100.0}))
    ends = {}
    while engine.has_work:
        ends |= {output.request_id: output for output in engine.step() if output.finish_reason}
    assert ends["broken"].finish_reason == "error"
    assert "no finite numbers" in ends["broken"].error
    assert ends["broken"].token_ids == []
    assert [ends[str(i)].finish_reason for i in range(len(healthy))] == ["length"] * len(healthy)
    assert engine.state.num_blocks_used == 0


@pytest.mark.parametrize("head_size", [12, 16], ids=["plain", "with kernels"])
def test_whoever_gets_its_blocks_next_does_not_notice(head_size):
    model = tiny_model(replace(ARCH, head_size=head_size))
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = math.nan
    engine = tiny_engine(model, num_blocks=4, block_size=16, prefix_cache=False)
    params = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={7: -100.0})
    assert engine.generate([[7, 8, 9] * 10], params)[0].finish_reason == "error"
    assert [engine.generate([[8, 9, 3]], params)[0].finish_reason for _ in range(3)] == ["length"] * 3


@pytest.mark.parametrize("temperature", [1e-25, 1e-40, 1e-300])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.5}])
def test_temperatures_next_to_nothing_are_as_good_as_greedy(temperature, settings):
    engine = tiny_engine()
    greedy = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0.0))[0]
    cold = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=temperature, **settings))[0]
    assert cold.token_ids == greedy.token_ids


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"stop": ["a"] * 65}, "stop must be at most 64 texts"),
        ({"stop": ["a" * 1001]}, "stop must be texts of at most 1000 characters"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias must be at most 1024 token ids"),
        ({"stop_token_ids": [1] * 1001}, "stop_token_ids must be at most 1000 token ids"),
    ],
)
def test_what_costs_time_for_every_token_has_limits(settings, reason):
    with pytest.raises(InvalidRequest, match=reason) as raised:
        SamplingParams(**settings)
    assert len(str(raised.value)) < 300  # whatever was sent


@pytest.mark.parametrize("settings", [{"logit_bias": {97: 1.0}}, {"stop_token_ids": [-1]}])
def test_token_ids_outside_of_the_vocabulary_are_refused(settings):
    with pytest.raises(InvalidRequest, match=f"{next(iter(settings))} has token ids outside of 0 … 96"):
        tiny_engine().add("odd", [1], SamplingParams(**settings))
