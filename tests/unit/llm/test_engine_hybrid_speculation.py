"""Proposals for networks with recurrent layers change no text: a sequence goes on from the state it has accepted."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.eager import EagerBackend, WholeAttention
from flambeau.llm.config import EngineConfig
from flambeau.llm.core import state_slots
from flambeau.llm.engine import Engine
from flambeau.llm.network_loader import load_network
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from flambeau.llm.speculation.speculator import Proposal
from support.checkpoints import HYBRID_KINDS, write_checkpoint
from support.statistics import chi_square_p
from support.tiny_models import ARCH, tiny_draft, tiny_engine, tiny_hybrid, tiny_model
from unit.llm.test_engine_hybrid import KINDS, KernelBackend, ids_of, random_ids, some_prompts, without_cache

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
backends = pytest.mark.parametrize("kind", [EagerBackend, KernelBackend])


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


class Oracle:
    """Proposes the tokens that texts go on with, or others from some place on."""

    reads_states = False

    def __init__(self, texts: list[list[int]], is_right) -> None:
        self._texts, self._is_right = texts, is_right
        self.num_accepted: list[int] = []

    def propose(self, sequences, limits, num_ahead):
        ids, lengths = torch.zeros(len(sequences), num_ahead, dtype=torch.int64), []
        for row, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            found = [text for text in self._texts if text[: len(sequence.tokens)] == sequence.tokens]
            coming = found[0][len(sequence.tokens) :][:limit] if found else []
            right = [token if self._is_right() else (token + 1) % ARCH.vocab_size for token in coming]
            ids[row, : len(right)] = torch.tensor(right, dtype=torch.int64)
            lengths.append(len(right))
        return Proposal(ids, lengths, None) if any(lengths) else None

    def record_accepted(self, sequence, num_before, num_proposed, num_accepted):
        self.num_accepted.append(num_accepted)

    def observe(self, spans):
        pass

    def forget(self, sequence):
        pass


def oracle_engine(model, expected, is_right=lambda: True, **options):
    engine = tiny_engine(model, speculation="lookup", **{"speculate_k": 4, **options})
    texts = [[*prompt, *text] for prompt, text in zip(some_prompts(), expected, strict=True)]
    engine._executor._speculator._proposer = oracle = Oracle(texts, is_right)
    return engine, oracle


def likeliest(model, ids: list[int]) -> list[int]:
    """The token that the network finds likeliest after each token of a text."""
    with torch.inference_mode():
        return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())).argmax(-1).tolist()


def sometimes():
    return (lambda rng: lambda: rng.random() < 0.7)(random.Random(3))


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_hybrid(request.param)


@pytest.fixture(scope="module")
def expected(model):
    return [without_cache(model, prompt, NUM_TOKENS) for prompt in some_prompts()]


@backends
def test_tokens_that_are_always_right_are_all_accepted(model, expected, kind):
    engine, oracle = oracle_engine(model, expected, kind=kind)
    found = engine.generate(some_prompts(), GREEDY)
    assert ids_of(found) == expected
    # Of 14 tokens, one comes with the prompt: 5, 5, then 3 as there is room for no more.
    assert [(each.counts.num_drafted, each.counts.num_accepted) for each in found] == [(10, 10)] * 6
    assert set(oracle.num_accepted) == {4, 2}


@backends
def test_tokens_that_are_never_right_are_all_rejected(model, expected, kind):
    engine, oracle = oracle_engine(model, expected, lambda: False, kind=kind)
    assert ids_of(engine.generate(some_prompts(), GREEDY)) == expected
    assert set(oracle.num_accepted) == {0}


@backends
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 54},
        {"max_step_tokens": 40, "speculate_k": 2},
        {"max_num_seqs": 2, "speculate_k": 5},
        {"spare": 13, "max_num_seqs": 4},
        {"max_step_tokens": 48, "num_blocks": 60, "speculate_k": 1},
    ],
    ids=["", "preempted", "in chunks", "few slots", "proposals for three", "both"],
)
def test_a_state_is_that_of_the_last_accepted_token(model, expected, kind, options):
    engine, oracle = oracle_engine(model, expected, sometimes(), kind=kind, **options)
    for _ in range(2):
        assert ids_of(engine.generate(some_prompts(), GREEDY)) == expected
    assert sum(oracle.num_accepted) > 0
    assert min(oracle.num_accepted) == 0
    if "num_blocks" in options:
        assert engine.state.num_preempted > 0
    slots = engine._scheduler._state_slots
    assert slots.num_free == engine.config.max_num_seqs
    assert len(slots._free) + len(slots._snapshots) == slots.number + slots.num_spare


def test_sequences_with_and_without_proposals_share_steps(model, expected):
    engine, _ = oracle_engine(model, expected, sometimes())
    options = [{}, {"speculate": False}, {"seed": 1}, {"seed": 2, "temperature": 0.7}, {"logprobs": 1}, {}]
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, **each}) for each in options]
    plain = tiny_engine(model)
    made = []
    for each in (engine, plain):
        texts = [[] for _ in params]
        for i, prompt in enumerate(some_prompts()):
            each.add(str(i), prompt, params[i])
        while each.has_work:
            for output in each.step():
                texts[int(output.request_id)] += output.token_ids
        made.append(texts)
    assert made[0] == made[1]


def test_a_request_that_leaves_gives_all_its_slots_back(model, expected):
    engine, _ = oracle_engine(model, expected, max_num_seqs=3)
    for name in ("one", "two"):
        engine.add(name, some_prompts()[2], GREEDY)
    for _ in range(3):
        engine.step()
    engine.cancel("one")
    engine.cancel("two")
    slots = engine._scheduler._state_slots
    assert len(slots._free) + len(slots._snapshots) == slots.number + slots.num_spare
    assert ids_of(engine.generate(some_prompts()[2:4], GREEDY)) == expected[2:4]


def test_snapshots_are_taken_and_used_beside_proposals(monkeypatch):
    """Conversations that branch, with few slots: what is kept of a prompt is what was computed of it."""
    monkeypatch.setattr(state_slots, "MIN_SPARED_TOKENS", 8)
    model, rng, num_cached, num_accepted = tiny_hybrid("joint"), random.Random(5), 0, 0
    engine = tiny_engine(model, max_num_seqs=3, speculation="lookup", speculate_k=3)
    texts = [random_ids(60, seed) for seed in range(2)]
    for _ in range(10):
        prompts = []
        for _ in range(rng.choice([1, 3])):
            text = rng.choice(texts)
            cut = rng.choice([len(text), rng.randrange(1, len(text))])
            prompts.append([*text[:cut], *random_ids(rng.randrange(1, 12), rng.random())][:90])
        wanted = [without_cache(model, prompt, 6) for prompt in prompts]
        engine._executor._speculator._proposer = oracle = Oracle(
            [[*prompt, *text] for prompt, text in zip(prompts, wanted, strict=True)], sometimes()
        )
        found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6))
        assert ids_of(found) == wanted
        num_cached += sum(completion.counts.num_cached for completion in found)
        num_accepted += sum(oracle.num_accepted)
        texts += prompts
    assert num_cached > 0
    assert num_accepted > 0
    assert engine._scheduler._state_slots.num_free == 3


@backends
def test_ngrams_propose(model, kind):
    prompts = [random_ids(9, seed) * 6 for seed in (1, 2)]
    engine = tiny_engine(model, kind=kind, speculation="lookup")
    found = engine.generate(prompts, GREEDY)
    assert ids_of(found) == [without_cache(model, prompt, NUM_TOKENS) for prompt in prompts]


def test_a_draft_without_recurrent_layers_proposes(model, expected):
    engine = tiny_engine(model, draft=tiny_model())
    found = engine.generate(some_prompts(), GREEDY)
    assert ids_of(found) == expected
    assert sum(each.counts.num_drafted for each in found) > 0


@backends
def test_a_draft_that_is_the_target_is_always_right(model, expected, kind):
    """Its states are those of the tokens that were accepted, after whatever was proposed beside them."""
    engine = tiny_engine(model, draft=copy.deepcopy(model), kind=kind, speculate_k=4)
    for prompts, texts in ((some_prompts(), expected), (some_prompts()[2:3], expected[2:3])):
        found = engine.generate(prompts, GREEDY)
        assert ids_of(found) == texts
        assert [each.counts.num_accepted for each in found] == [each.counts.num_drafted for each in found]
        assert min(each.counts.num_drafted for each in found) > 5


@pytest.fixture(scope="module")
def said(model) -> dict[tuple[int, ...], int]:
    """What the draft says after texts."""
    return {}


@backends
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 54},
        {"max_step_tokens": 40, "speculate_k": 2},
        {"max_num_seqs": 3, "rings": 2},
        {"speculate_k": 1},
    ],
    ids=["", "preempted", "in chunks", "rings for two", "one token"],
)
def test_a_draft_that_is_sometimes_right_goes_on_from_what_was_accepted(model, expected, said, kind, options):
    """What it proposes at any time is what it says after these tokens, whatever it has computed before."""
    draft, proposed = tiny_draft(model), []
    engine = tiny_engine(model, draft=draft, kind=kind, **{"speculate_k": 4, **options})
    proposer = engine._executor._speculator._proposer._other
    propose = proposer.propose

    def recorded(sequences, limits, num_ahead):
        proposal = propose(sequences, limits, num_ahead)
        if proposal is not None:
            rows = zip(sequences, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
            proposed.extend(([*s.tokens], ids[:length]) for s, ids, length in rows if length)
        return proposal

    proposer.propose = recorded
    for _ in range(2):
        found = engine.generate(some_prompts(), GREEDY)
        assert ids_of(found) == expected
    num_accepted = sum(each.counts.num_accepted for each in found)
    assert 0 < num_accepted < sum(each.counts.num_drafted for each in found)
    for tokens, ids in sorted(proposed, key=lambda each: -len(each[0])):  # the longer ones tell of shorter ones
        texts = [(*tokens, *ids[:number]) for number in range(len(ids))]
        if not said.keys() >= {*texts}:
            whole = [*tokens, *ids]
            said.update(((*whole[: i + 1],), token) for i, token in enumerate(likeliest(draft, whole)))
        assert ids == [said[text] for text in texts]
    assert len(proposer._rings._free) == options.get("rings", engine.config.max_num_seqs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_with_recurrent_layers_for_a_target_without(kind):
    target, prompts = tiny_model(), some_prompts()
    expected = ids_of(tiny_engine(target).generate(prompts, GREEDY))
    engine = tiny_engine(target, draft=tiny_hybrid(kind))
    found = engine.generate(prompts, GREEDY)
    assert ids_of(found) == expected
    assert sum(each.counts.num_drafted for each in found) > 0


def test_without_memory_for_further_states_it_is_off_or_shorter(caplog):
    model = tiny_hybrid("short_conv")
    engine = tiny_engine(model, speculation="lookup", spare=0)
    assert engine.info.speculation is None
    assert "speculation is off: there is no memory for the states of proposed tokens" in caplog.text
    engine = tiny_engine(model, speculation="lookup", spare=3)
    assert (engine.info.speculation, engine.info.speculate_k) == ("lookup", 3)
    assert "speculate_k is 3" in caplog.text


@pytest.mark.parametrize("draft", ["without recurrent layers", "with recurrent layers"])
def test_without_a_seed_the_distribution_is_the_targets(draft):
    """The second and third tokens of many answers, of which a draft proposes some."""
    model, prompt, four = tiny_hybrid("mamba2"), [1, 2, 3, 4, 4, 2, 1, 3], [1, 2, 3, 4]
    params = SamplingParams(max_tokens=3, top_k=4, temperature=2.0, n=128, logit_bias=dict.fromkeys(four, 100.0))
    drafting = tiny_model() if draft == "without recurrent layers" else tiny_draft(model, change=0.1)
    engine = tiny_engine(model, draft=drafting, max_num_seqs=64, max_step_tokens=1024)
    completions = [each for _ in range(6) for each in engine.generate([prompt], params)]
    assert 0 < sum(c.counts.num_accepted for c in completions) < sum(c.counts.num_drafted for c in completions)

    def shares(ids):
        with torch.inference_mode():
            logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())[-1])
        return (logits[1:5].double() / 2.0).softmax(-1).tolist()

    expected = {}
    for first in four:
        for second in four:
            for third in four:
                chance = shares(prompt)[first - 1] * shares([*prompt, first])[second - 1]
                chance *= shares([*prompt, first, second])[third - 1]
                expected[second, third] = expected.get((second, third), 0.0) + chance * len(completions)
    pairs = [tuple(completion.token_ids[1:]) for completion in completions]
    found = [pairs.count(pair) for pair in expected]
    assert sum(found) == len(pairs)
    assert chi_square_p(found, [*expected.values()]) > 1e-4


def test_states_after_verification_have_the_bits_of_single_steps(model, expected):
    """In the C++ kernels, which compute tokens one after the other."""
    prompts, texts = some_prompts(), [[*p, *text] for p, text in zip(some_prompts(), expected, strict=True)]
    found = []
    for known in ([], texts):
        engine = tiny_engine(model, kind=KernelBackend, speculation="lookup", speculate_k=4)
        engine._executor._speculator._proposer = oracle = Oracle(known, lambda: True)
        states = {}
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=30))
        while len(states) < len(prompts):
            engine.step()
            for sequence in engine._scheduler.running:
                if sequence.num_generated == 11:
                    layers = engine._backend.cache.states.layers.values()
                    states[sequence.request_id] = [
                        kept[sequence.state_slot].clone() for each in layers for kept in each
                    ]
        assert bool(sum(oracle.num_accepted)) == bool(known)
        found.append(states)
    for one, other in zip(*([each[str(i)] for i in range(len(prompts))] for each in found), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_every_family_says_the_same(kind, tmp_path):
    """In plain PyTorch and in the kernels."""
    write_checkpoint(tmp_path, kind)
    prompts = [[7, 8, 9, 10, 11] * 3, [5, 6, 7], [30, 20, 10] * 5]
    config = EngineConfig(device="cpu", num_blocks=60, block_size=4, max_num_seqs=4, speculate_k=3)
    for compiles in (False, True):
        texts, oracle = [], None
        for speculation in (None, "lookup"):
            changed = replace(config, compile=compiles, speculation=speculation)
            loaded = load_network(tmp_path, changed, torch.device("cpu"), None)
            loaded.backend.wait_until_compiled(timeout_s=250)
            for has_oracle in (False, True)[: 1 + bool(speculation)]:
                engine = Engine(
                    *(loaded.arch, loaded.backend),
                    num_blocks=loaded.num_blocks,
                    state_cache=loaded.state_cache,
                    config=loaded.config,
                )
                assert engine.info.speculation == speculation
                if has_oracle:
                    known = [[*prompt, *text] for prompt, text in zip(prompts, texts[0], strict=True)]
                    engine._executor._speculator._proposer = oracle = Oracle(known, sometimes())
                texts.append(ids_of(engine.generate(prompts, temperature=0.0, max_tokens=16, ignore_eos=True)))
            loaded.backend.close()
        assert texts[0] == texts[1] == texts[2]
        assert oracle is not None
        assert sum(oracle.num_accepted) > 0
