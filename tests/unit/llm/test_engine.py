"""The engine gives every sequence the tokens it gets alone, whatever else runs beside it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.tiny_models import ARCH, tiny_engine, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def without_cache(model, prompt: list[int], num_tokens: int = 20) -> list[int]:
    """Greedy tokens, each from the whole sequence computed anew."""
    ids = [*prompt]
    with torch.inference_mode():
        for _ in range(num_tokens):
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())
            ids.append(int(model.logits(hidden[-1]).argmax()))
    return ids[len(prompt) :]


def some_prompts(number: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(ARCH.vocab_size) for _ in range(rng.randrange(1, 40))] for _ in range(number)]


def ids_of(completions) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(model):
    return [without_cache(model, prompt) for prompt in some_prompts(32)]


def test_paged_is_contiguous_is_no_cache(model, expected):
    prompts = some_prompts(4)
    paged = tiny_engine(model, block_size=4)
    contiguous = tiny_engine(model, block_size=256, num_blocks=8)
    assert ids_of(paged.generate(prompts, GREEDY)) == expected[:4]
    assert ids_of(contiguous.generate(prompts, GREEDY)) == expected[:4]


def test_a_batch_of_32_is_each_alone(model, expected):
    engine = tiny_engine(model, num_blocks=800)
    assert ids_of(engine.generate(some_prompts(32), GREEDY)) == expected
    alone = tiny_engine(model)
    assert [ids_of(alone.generate([prompt], GREEDY))[0] for prompt in some_prompts(32)] == expected


@pytest.mark.parametrize("max_step_tokens", [1, 3, 7])
def test_a_prompt_in_chunks_is_the_whole_prompt(model, expected, max_step_tokens):
    engine = tiny_engine(model, max_step_tokens=max_step_tokens)
    assert ids_of(engine.generate(some_prompts(5), GREEDY)) == expected[:5]


def test_preempted_is_undisturbed(model, expected):
    engine = tiny_engine(model, num_blocks=24, prefix_cache=False)
    assert ids_of(engine.generate(some_prompts(12), GREEDY)) == expected[:12]
    assert engine.state.num_preempted > 0
    assert engine.state.num_blocks_used == 0


def test_a_prompt_that_is_computed_again_after_a_preemption_does_not_count_as_cached(model):
    engine = tiny_engine(model, num_blocks=24)
    completions = engine.generate([[i, *[50 + i] * 11] for i in range(12)], GREEDY)
    assert engine.state.num_preempted > 0
    assert [completion.counts.num_cached for completion in completions] == [0] * 12


def test_a_prompt_that_others_began_with_is_not_computed_again(model):
    engine = tiny_engine(model)
    prompt = some_prompts(1)[0] * 3
    first = engine.generate([prompt], GREEDY)[0]
    second = engine.generate([prompt], GREEDY)[0]
    assert second.token_ids == first.token_ids
    assert first.counts.num_cached == 0
    assert second.counts.num_cached == (len(prompt) - 1) // 4 * 4


def test_a_conversation_goes_on_without_computing_it_again(model):
    engine = tiny_engine(model)
    prompt = some_prompts(1)[0]
    first = engine.generate([prompt], GREEDY)[0]
    longer = [*prompt, *first.token_ids, 5, 6, 7]
    second = engine.generate([longer], GREEDY)[0]
    assert second.counts.num_cached >= (len(prompt) + 19) // 4 * 4 - 4
    assert second.token_ids == without_cache(model, longer)


def test_only_requests_with_the_same_salt_share_a_prefix(model):
    engine = tiny_engine(model)
    prompt = some_prompts(1)[0] * 3

    def cached(salt, number=1):
        engine.add("r", prompt, replace(GREEDY, n=number), cache_salt=salt)
        outputs = [output for _ in range(200) if engine.has_work for output in engine.step()]
        ids = [token for output in outputs if output.index == 0 for token in output.token_ids]
        assert ids == without_cache(model, prompt)
        return [output.counts.num_cached for output in outputs if output.counts]

    whole = (len(prompt) - 1) // 4 * 4
    assert [cached(salt) for salt in ("", "a", "b", "a", "", "b")] == [[0], [0], [0], [whole], [whole], [whole]]
    assert cached("c", number=2) == [0, whole]


def test_ranks_of_a_prompts_tokens_count_those_at_least_as_likely(model):
    prompt = some_prompts(1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    tiny = tiny_engine(model)
    [completion] = tiny.generate([prompt], params)
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor(prompt), torch.arange(len(prompt)), WholeAttention())).float()
    assert len(completion.prompt_tokens) == len(prompt) - 1
    for place, info in enumerate(completion.prompt_tokens):
        order = logits[place].sort(descending=True).indices.tolist()
        assert info.rank == order.index(prompt[place + 1]) + 1
        assert [token for token, _ in info.top] == order[:3]
    assert completion.tokens is None
    assert tiny.generate([prompt], replace(params, prompt_logprobs=None))[0].prompt_tokens is None


def test_choices_share_the_prompt(model):
    engine = tiny_engine(model)
    prompt = some_prompts(1)[0] * 2
    choices = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=5, n=3))
    assert len(choices) == 3
    assert [choice.counts.num_cached for choice in choices] == [0, *[(len(prompt) - 1) // 4 * 4] * 2]
    assert {tuple(choice.token_ids) for choice in choices} == {tuple(without_cache(model, prompt, 5))}


@pytest.mark.parametrize("length", [8, 9, 10, 17])
def test_all_choices_begin_wherever_steps_divide_the_prompt(model, length):
    engine = tiny_engine(model, max_step_tokens=8)
    engine.add("x", [*range(1, length + 1)], SamplingParams(temperature=0.0, max_tokens=4, n=3))
    outputs = [output for _ in range(40) for output in engine.step()]
    assert sorted(output.index for output in outputs if output.finish_reason) == [0, 1, 2]
    assert not engine.has_work


def test_a_sequence_goes_on_where_another_engine_stopped(model, expected):
    engine = tiny_engine(model)
    prompt = some_prompts(1)[0]
    engine.add("resumed", prompt, GREEDY, generated=[expected[0][:7]])
    made = []
    while engine.has_work:
        made += [token for output in engine.step() for token in output.token_ids]
    assert made == expected[0][7:]


def test_a_sequence_that_has_become_too_long_for_this_engine_is_refused(model):
    """It would wait for blocks that never come, and everybody behind it."""
    engine = tiny_engine(model, num_blocks=6)
    with pytest.raises(InvalidRequest, match="no room"):
        engine.add("resumed", [1, 2, 3], SamplingParams(temperature=0.0), generated=[[4] * 17])
    with pytest.raises(InvalidRequest, match="no room"):
        engine.add("resumed", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5), generated=[[4] * 5])
    assert not engine.has_work


def test_a_list_of_prompts_of_which_one_is_refused_leaves_nothing_behind(model):
    engine = tiny_engine(model)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate([[1, 2, 3], []], GREEDY)
    assert not engine.has_work


def test_a_cancelled_request_frees_its_blocks_at_once(model):
    engine = tiny_engine(model)
    for i, prompt in enumerate(some_prompts(6)):
        engine.add(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=100, n=2))
    for _ in range(5):
        engine.step()
    for i in range(6):
        engine.cancel(str(i))
    assert engine.state.num_blocks_used == 0
    assert not engine.has_work
    assert engine.step() == []


def test_neighbors_of_a_cancelled_request_do_not_notice(model, expected):
    engine = tiny_engine(model)
    prompts = some_prompts(8)
    made = {str(i): [] for i in range(8)}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, GREEDY)
    for step in range(60):
        for output in engine.step():
            made[output.request_id] += output.token_ids
        if step == 4:
            for i in (1, 4, 6):
                engine.cancel(str(i))
    assert [made[str(i)] for i in (0, 2, 3, 5, 7)] == [expected[i] for i in (0, 2, 3, 5, 7)]
    assert engine.state.num_blocks_used == 0


def test_those_who_came_first_run_first(model):
    engine = tiny_engine(model, max_num_seqs=2)
    for i, prompt in enumerate(some_prompts(6)):
        engine.add(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=3))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == sorted(order)


def test_the_context_is_the_limit(model):
    engine = tiny_engine(model, max_model_len=24)
    completion = engine.generate([[1] * 20], SamplingParams(temperature=0.0))[0]
    assert len(completion.token_ids) == 4
    assert completion.finish_reason == "length"
    with pytest.raises(InvalidRequest, match="shorter prompt"):
        engine.add("x", [1] * 24, GREEDY)


def test_one_sequence_never_needs_more_blocks_than_there_are(model):
    engine = tiny_engine(model, num_blocks=5)
    completion = engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0))[0]
    assert len(completion.token_ids) == 13
    assert completion.finish_reason == "length"


def test_it_stops_where_it_is_told(model, expected):
    engine = tiny_engine(model)
    end = expected[0][5]
    first = expected[0].index(end) + 1
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[end])
    completion = engine.generate([some_prompts(1)[0]], params)[0]
    assert completion.token_ids == expected[0][:first]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(("prompt", "reason"), [([], "empty"), ([97], "0 … 96"), ([-1], "0 … 96")])
def test_a_prompt_that_cannot_be_meant_is_refused(model, prompt, reason):
    with pytest.raises(InvalidRequest, match=reason):
        tiny_engine(model).add("x", prompt, GREEDY)


def test_a_stream_that_is_closed_is_cancelled(model):
    engine = tiny_engine(model)
    stream = engine.stream([1, 2, 3], SamplingParams(temperature=0.0))
    next(stream)
    stream.close()
    assert not engine.has_work
    assert engine.state.num_blocks_used == 0


SAMPLED = SamplingParams(temperature=0.9, top_k=30, seed=5, max_tokens=20)


def ahead_engine(model, **options):
    """One that starts a step before the tokens of the step before are read."""
    return tiny_engine(model, kind=AsyncEagerBackend, **options)


def test_steps_start_before_the_tokens_of_the_step_before_are_read(model, expected):
    engine = ahead_engine(model)
    assert ids_of(engine.generate(some_prompts(4), GREEDY)) == expected[:4]
    assert engine._backend.num_started == 19  # after the prompts; the last step has no successor
    assert engine._backend.num_ahead == 18
    assert engine.state.num_blocks_used == 0


def test_nothing_is_delivered_after_a_stop_that_is_found_while_the_next_step_runs(model):
    prompts = some_prompts(6)
    plain = ids_of(tiny_engine(model).generate(prompts, SAMPLED))
    stops = [ids[i] for i, ids in enumerate(plain)]
    params = [replace(SAMPLED, stop_token_ids=[stop]) for stop in stops]
    engine, delivered = ahead_engine(model), {}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params[i])
    while engine.has_work:
        for output in engine.step():
            assert delivered.get(output.request_id, ([], None))[1] is None  # nothing comes after the end
            ids = delivered.setdefault(output.request_id, ([], None))[0] + output.token_ids
            delivered[output.request_id] = (ids, output.finish_reason)
    for i, ids in enumerate(plain):
        assert delivered[str(i)] == (ids[: ids.index(stops[i]) + 1], "stop")
    assert engine.state.num_blocks_used == 0


def test_a_request_that_is_cancelled_or_joins_while_a_step_runs_changes_nothing_for_others(model):
    prompts = some_prompts(3)
    expected = ids_of(tiny_engine(model).generate(prompts, SAMPLED))
    engine, found = ahead_engine(model), {"0": [], "2": []}
    engine.add("0", prompts[0], SAMPLED)
    engine.add("1", prompts[1], SAMPLED)
    for step in range(60):
        for output in engine.step():
            if output.request_id in found:
                found[output.request_id] += output.token_ids
            else:
                assert step <= 5
        if step == 5:
            engine.cancel("1")
            engine.add("2", prompts[2], SAMPLED)
    assert [found["0"], found["2"]] == [expected[0], expected[2]]
    assert engine.state.num_blocks_used == 0


def test_a_step_whose_sequences_have_all_left_is_not_waited_for(model, expected):
    engine = ahead_engine(model)
    engine.add("gone", some_prompts(1)[0], GREEDY)
    for _ in range(4):
        engine.step()
    engine.cancel("gone")
    assert not engine.has_work
    assert ids_of(engine.generate(some_prompts(2), GREEDY)) == expected[:2]


# ---- log-probabilities of prompts ----


def scores_of(model, tokens: list[int]) -> list[float]:
    """The log-probability of each token but the first, from the whole sequence."""
    with torch.inference_mode():
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), WholeAttention())
        logprobs = torch.log_softmax(model.logits(hidden).float(), -1)
    return [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]


def scored(engine, prompts, params):
    """The prompt's infos of each choice, by request and index."""
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, params, scores_prompt=True)
    found = {}
    while engine.has_work:
        for output in engine.step():
            if output.prompt_tokens is not None:
                assert (output.request_id, output.index) not in found
                found[output.request_id, output.index] = output.prompt_tokens
    return found


@pytest.mark.parametrize(
    "options", [{}, {"max_step_tokens": 8}, {"num_blocks": 24}], ids=["plain", "chunks", "preempted"]
)
def test_prompts_are_scored_also_in_chunks_and_after_a_preemption(model, options):
    engine = tiny_engine(model, block_size=4, **options)
    prompts = some_prompts(4, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, n=2)
    for _ in range(2):  # the second time the prompts are cached
        found = scored(engine, prompts, params)
        assert len(found) == 8
        for i, prompt in enumerate(prompts):
            for index in range(2):
                infos = found[f"r{i}", index]
                assert [info.id for info in infos] == prompt[1:]
                assert all(len(info.top) == 2 for info in infos)
                torch.testing.assert_close(
                    torch.tensor([info.logprob for info in infos]),
                    torch.tensor(scores_of(model, prompt)),
                    atol=1e-4,
                    rtol=1e-4,
                )


def test_prompt_is_not_scored_unless_asked(model):
    engine = tiny_engine(model)
    engine.add("r", [1, 2, 3], replace(GREEDY, logprobs=1))
    while engine.has_work:
        assert all(output.prompt_tokens is None for output in engine.step())
