"""Sequences of a network with recurrent layers get the tokens they get alone: each has a state of its own."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.eager import EagerBackend, WholeAttention
from flambeau.llm.core import state_slots
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.cpu_kernels import need_cpu_kernels
from support.tiny_models import ARCH, tiny_engine, tiny_hybrid, tiny_model

KINDS = ("mamba", "mamba2", "short_conv", "delta_net", "kimi_delta", "lightning", "joint")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


def some_prompts(number: int = 6) -> list[list[int]]:
    """Some shorter than a chunk of a scan, some longer; two of one token."""
    rng = random.Random(1)
    lengths = [1, 3, 90, 17, 1, 66][:number]
    return [[rng.randrange(ARCH.vocab_size) for _ in range(length)] for length in lengths]


def without_cache(model: Transformer, prompt: list[int], num_tokens: int = 10) -> list[int]:
    """Greedy tokens, each from the whole sequence computed anew."""
    ids = [*prompt]
    with torch.inference_mode():
        for _ in range(num_tokens):
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())
            ids.append(int(model.logits(hidden[-1]).argmax()))
    return ids[len(prompt) :]


def ids_of(completions) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", params=KINDS)
def model(request) -> Transformer:
    return tiny_hybrid(request.param)


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return [without_cache(model, prompt) for prompt in some_prompts()]


class KernelBackend(CpuBackend):
    """The C++ kernels from the first step on, with weights of their own."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        need_cpu_kernels()
        super().__init__(copy.deepcopy(model), cache)
        assert self.wait_until_compiled(timeout_s=250)
        assert self.decode_path == "CPU kernels"


backends = pytest.mark.parametrize("kind", [EagerBackend, KernelBackend])


@backends
def test_a_batch_is_each_alone(model, expected, kind):
    assert ids_of(tiny_engine(model, kind=kind).generate(some_prompts(), GREEDY)) == expected
    alone = tiny_engine(model, kind=kind)
    assert [ids_of(alone.generate([prompt], GREEDY))[0] for prompt in some_prompts()] == expected


@backends
@pytest.mark.parametrize("max_step_tokens", [5, 64])
def test_a_prompt_in_chunks_beside_others_that_decode_is_the_whole_prompt(model, expected, max_step_tokens, kind):
    engine = tiny_engine(model, max_step_tokens=max_step_tokens, kind=kind)
    assert ids_of(engine.generate(some_prompts(), GREEDY)) == expected


@backends
def test_preempted_is_undisturbed(model, expected, kind):
    engine = tiny_engine(model, num_blocks=53, kind=kind)
    assert ids_of(engine.generate(some_prompts(), GREEDY)) == expected
    assert engine.state.num_preempted > 0
    assert engine.state.num_blocks_used == 0


def test_slots_of_sequences_that_left_are_used_again(model, expected):
    engine = tiny_engine(model, max_num_seqs=2)
    assert ids_of(engine.generate(some_prompts(), GREEDY)) == expected
    assert engine._scheduler._state_slots.num_free == 2


def test_a_cancelled_request_gives_its_slot_back(model, expected):
    engine = tiny_engine(model, max_num_seqs=2)
    prompts = some_prompts()
    for name in ("one", "two"):
        engine.add(name, prompts[2], GREEDY)
    for _ in range(3):
        engine.step()
    engine.cancel("one")
    engine.cancel("two")
    assert engine._scheduler._state_slots.num_free == 2
    assert ids_of(engine.generate(prompts[2:4], GREEDY)) == expected[2:4]


def test_steps_that_are_started_ahead_advance_the_state_once(model, expected):
    engine = tiny_engine(model, kind=AsyncEagerBackend)
    assert ids_of(engine.generate(some_prompts(), GREEDY)) == expected
    assert engine._backend.num_ahead > 5


def test_choices_of_a_request_have_states_of_their_own(model, expected):
    choices = tiny_engine(model).generate([some_prompts()[3]], SamplingParams(temperature=0.0, max_tokens=10, n=3))
    assert ids_of(choices) == [expected[3]] * 3
    assert [choice.counts.num_cached for choice in choices] == [0, 0, 0]


def test_the_log_probabilities_of_a_prompt_are_those_of_the_whole(model):
    engine, prompt = tiny_engine(model, max_step_tokens=16), some_prompts()[5]
    engine.add("one", prompt, SamplingParams(temperature=0.0, max_tokens=2, logprobs=0), scores_prompt=True)
    infos = next(output.prompt_tokens for _ in range(20) for output in engine.step())
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(prompt), torch.arange(len(prompt)), WholeAttention()))
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).flatten()
    torch.testing.assert_close(torch.tensor([info.logprob for info in infos]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "recurrent"), [("int8", "mamba"), ("int8", "delta_net"), ("int4", "mamba2")])
def test_quantized_projections_give_a_batch_what_they_give_each_alone(kind, recurrent):
    model, prompts = quantize(tiny_hybrid(recurrent), kind, group_size=32), some_prompts(4)
    assert type(model.model.layers[0].mixer.out_proj).__name__ == f"{kind.capitalize()}Linear"
    found = ids_of(tiny_engine(model, max_step_tokens=32).generate(prompts, GREEDY))
    assert found == [without_cache(model, prompt) for prompt in prompts]


def test_a_network_without_attention_has_blocks_without_memory():
    model = tiny_hybrid("mamba2", layers=frozenset({0, 1, 2}))
    engine = tiny_engine(model)
    assert sum(keys.numel() for keys in engine._backend.cache.keys) == 0
    assert ids_of(engine.generate(some_prompts(4), GREEDY)) == [without_cache(model, p) for p in some_prompts(4)]


# ---- prefixes: blocks, and a snapshot of the state at their end ----


def random_ids(number: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ARCH.vocab_size) for _ in range(number)]


@backends
def test_the_next_turn_of_a_conversation_goes_on_from_a_snapshot(model, kind):
    engine, prompt = tiny_engine(model, kind=kind), random_ids(150, 1)
    first = engine.generate([prompt], GREEDY)[0]
    assert first.token_ids == without_cache(model, prompt)
    longer = [*prompt, *first.token_ids, *random_ids(20, 2)]
    second = engine.generate([longer], GREEDY)[0]
    assert second.token_ids == without_cache(model, longer)
    assert [first.counts.num_cached, second.counts.num_cached] == [0, 148]


def test_prompts_that_part_in_the_middle_share_what_they_begin_with(model):
    engine, beginning = tiny_engine(model), random_ids(160, 1)
    prompts = [[*beginning, *random_ids(30, seed)] for seed in (2, 3, 4)]
    found = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert ids_of(found) == [without_cache(model, prompt) for prompt in prompts]
    # The second shows where prompts part, and leaves a snapshot there for the third.
    assert [completion.counts.num_cached for completion in found] == [0, 0, 160]


def test_choices_of_a_long_prompt_begin_with_its_snapshot(model):
    prompt = random_ids(150, 1)
    choices = tiny_engine(model).generate([prompt], SamplingParams(temperature=0.0, max_tokens=5, n=3))
    assert ids_of(choices) == [without_cache(model, prompt, 5)] * 3
    assert [choice.counts.num_cached for choice in choices] == [0, 148, 148]


def test_sequences_take_the_slots_of_snapshots(model):
    engine, prompts = tiny_engine(model, max_num_seqs=2), [random_ids(140, seed) for seed in (1, 2, 3)]
    for prompt in [*prompts, *prompts]:
        assert ids_of(engine.generate([prompt, prompt[:5]], GREEDY)) == [
            without_cache(model, prompt),
            without_cache(model, prompt[:5]),
        ]
    assert engine._scheduler._state_slots.num_free == 2


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 3}, {"num_blocks": 60}, {"max_num_seqs": 2, "max_step_tokens": 24}]
)
def test_shared_prefixes_under_pressure_change_no_token(options, monkeypatch):
    """Conversations that branch, with few slots or blocks: snapshots come and go, sequences are preempted."""
    monkeypatch.setattr(state_slots, "MIN_SPARED_TOKENS", 8)
    model, rng = tiny_hybrid("joint"), random.Random(5)
    engine = tiny_engine(model, **{"max_num_seqs": 6, "num_blocks": 160, **options})
    texts, num_cached = [random_ids(60, seed) for seed in range(2)], 0
    for _ in range(10):
        prompts = []
        for _ in range(rng.choice([1, 3])):
            text = rng.choice(texts)
            cut = rng.choice([len(text), rng.randrange(1, len(text))])
            prompts.append([*text[:cut], *random_ids(rng.randrange(1, 12), rng.random())][:90])
        found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
        assert ids_of(found) == [without_cache(model, prompt, 4) for prompt in prompts]
        num_cached += sum(completion.counts.num_cached for completion in found)
        texts += prompts
    assert num_cached > 0
    assert engine.state.num_blocks_used == 0
    assert engine._scheduler._state_slots.num_free == engine.config.max_num_seqs


def test_without_a_prefix_cache_nothing_is_kept():
    engine, prompt = tiny_engine(tiny_hybrid("short_conv"), prefix_cache=False), random_ids(150, 1)
    twice = [engine.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert twice[0].token_ids == twice[1].token_ids
    assert twice[1].counts.num_cached == 0
    assert not engine._scheduler._state_slots._snapshots


def test_other_networks_have_no_states():
    engine = tiny_engine(tiny_model())
    assert not engine._backend.cache.states.has_layers
    assert engine.config.prefix_cache
