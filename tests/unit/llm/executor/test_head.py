"""Heads in the engine: they propose what a plain twin computes, and never change the text."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cpu.head import CpuHead, can_compute_head
from flambeau.llm.backends.cuda.graphs import size_for
from flambeau.llm.backends.cuda.head_rounds import CapturedRound, RoundBuffers
from flambeau.llm.backends.eager import EagerBackend, PagedAttention, WholeAttention
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.executor.head import HeadModel, HeadProposer
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.sampling import rng
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.cpu_kernels import need_cpu_kernels
from support.statistics import chi_square_p
from support.tiny_heads import tiny_head, twin_proposals
from support.tiny_models import ARCH, tiny_engine, tiny_hybrid, tiny_model

KINDS = {
    "eagle3": {"draft_vocab_size": 24, "norms_each": True},
    "eagle3 with all tokens": {"norm_before_residual": True, "norm_before_projection": True, "norms_output": True},
    "eagle": {"has_bias": True},
    "mtp": {},
    "mtp hidden first": {"hidden_first": True, "has_embeddings": True},
}
MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "speculate": False},
    {"seed": 1},
    {"seed": 3, "top_p": 0.8, "temperature": 0.5, "min_tokens": 10},
    {"temperature": 0.0, "logprobs": 2},
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


def head_of(name, model):
    return tiny_head(name.split()[0], model, **KINDS[name])


def some_prompts(number, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(ARCH.vocab_size) for _ in range(rng.randrange(2, 30))] for _ in range(number)]


def run(engine, prompts, params):
    made, ends = [[] for _ in prompts], {}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params[i % len(params)])
    while engine.has_work:
        for output in engine.step():
            made[int(output.request_id)] += output.token_ids
            if output.finish_reason:
                ends[int(output.request_id)] = output
    assert engine.state.num_blocks_used == 0
    return made, [ends[i] for i in range(len(prompts))]


PROMPTS = some_prompts(7)
PROMPTS += [[*PROMPTS[0], 5, 6], [*PROMPTS[1][:13], 7, 7, 7]]  # they begin like others


@pytest.fixture(scope="module")
def plain(model):
    params = [SamplingParams(max_tokens=25, **each) for each in MIXED]
    return params, *run(tiny_engine(model), PROMPTS, params)


PLAIN = [SamplingParams(max_tokens=most, temperature=0.0) for most in (12, 20, 25)]  # of their logits alone


def is_plain(params):
    return replace(params, seed=None) in PLAIN  # where torch was seeded, a seed is drawn


@pytest.fixture
def proposals(monkeypatch):
    """What heads propose: tokens before, tokens proposed."""
    found = []
    propose = HeadProposer.propose

    def recorded(self, sequences, limits, num_ahead):
        proposal = propose(self, sequences, limits, num_ahead)
        if proposal is not None:
            rows = zip(sequences, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
            found.extend(([*s.tokens], ids[:length]) for s, ids, length in rows if length and is_plain(s.params))
        return proposal

    monkeypatch.setattr(HeadProposer, "propose", recorded)
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"num_blocks": 40}),
        ("eagle3 with all tokens", {"max_step_tokens": 40, "speculate_k": 3, "max_num_seqs": 4}),
        ("eagle", {"block_size": 16}),
        ("mtp", {"max_num_seqs": 3, "speculate_k": 7}),
        ("mtp hidden first", {"num_blocks": 40}),
    ],
    ids=["roomy", "preempted", "in chunks", "long blocks", "three at a time", "preempted too"],
)
def test_it_proposes_what_its_twin_does_and_changes_no_text(model, plain, proposals, name, options):
    """After prompts, prefixes that are known, preemptions and steps in which others were accepted."""
    params, tokens, ends = plain
    head = head_of(name, model)
    engine = tiny_engine(model, head=head, **options)
    for _ in range(2):
        made, made_ends = run(engine, PROMPTS, params)
        assert made == tokens
        assert [end.finish_reason for end in made_ends] == [end.finish_reason for end in ends]
    assert (engine.state.num_preempted > 0) == ("num_blocks" in options)
    check_proposals(proposals, head, model)


def check_proposals(proposals, head, model):
    assert len(proposals) > 10
    for tokens, proposed in random.Random(2).sample(proposals, 10):
        assert proposed == twin_proposals(head, model, tokens, len(proposed))


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "short_conv", "delta_net", "joint"])
@pytest.mark.parametrize(("name", "options"), [("eagle3", {}), ("mtp", {"num_blocks": 40}), ("eagle", {})])
def test_it_proposes_for_networks_with_recurrent_layers(kind, name, options, proposals):
    target = tiny_hybrid(kind)
    params = [SamplingParams(max_tokens=25, **each) for each in MIXED]
    expected, _ = run(tiny_engine(target), PROMPTS, params)
    head = head_of(name, target)
    engine = tiny_engine(target, head=head, **options)
    made, _ = run(engine, PROMPTS, params)
    assert made == expected
    assert (engine.state.num_preempted > 0) == ("num_blocks" in options)
    check_proposals(proposals, head, target)


def test_hidden_states_of_a_float32_stream_have_the_type_of_the_network():
    arch = replace(tiny_hybrid("mamba2", layers=frozenset({0, 1, 2})).arch, wide_residual=True, has_mlp=False)
    target = tiny_model(arch).bfloat16()
    hidden, found = target.with_layer_inputs(torch.tensor([1, 2]), torch.arange(2), WholeAttention(), None, (0, 1, 3))
    assert [each.dtype for each in (hidden, *found)] == [torch.bfloat16] * 4


def test_a_prompt_that_goes_on_from_a_snapshot_has_proposals():
    """The head lacks the entry of the last token before it; that changes proposals, and no text."""
    target = tiny_hybrid("mamba2")
    prompt = some_prompts(1)[0] * 30
    longer = [*prompt, *some_prompts(1, seed=4)[0]]
    options = {"temperature": 0.0, "max_tokens": 12}
    plain, engine = tiny_engine(target), tiny_engine(target, head=head_of("mtp", target))
    assert len(prompt) > 140
    for ids in (prompt, longer):
        expected, found = (each.generate([ids], **options)[0] for each in (plain, engine))
        assert found.token_ids == expected.token_ids
        assert found.counts.num_cached == expected.counts.num_cached
        assert found.counts.num_drafted > 0
    assert found.counts.num_cached > 0


def test_steps_with_and_without_it_take_turns(model, plain, proposals, monkeypatch):
    params, tokens, _ = plain
    turns = itertools.cycle([5, *[0] * 9, 5, 5])
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda *_: next(turns))
    head = head_of("eagle3", model)
    engine = tiny_engine(model, head=head)
    for _ in range(2):
        assert run(engine, PROMPTS, params)[0] == tokens
    check_proposals(proposals, head, model)


def no_attention(cache, inputs):
    pytest.fail("the head ran as plain PyTorch")


@pytest.mark.timeout(300)  # the kernels may have to be built
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_hand_over_hidden_states_and_compute_heads(name, proposals):
    need_cpu_kernels()
    model = tiny_model(replace(ARCH, head_size=16, hidden_size=64))
    params = [SamplingParams(max_tokens=20, temperature=0.0), SamplingParams(max_tokens=20, seed=3)]
    expected, _ = run(tiny_engine(model), some_prompts(8), params)
    head, cache = head_of(name, model), KVCache(model.arch, 200, 4)
    states = HiddenStates(head.settings.layers)
    backend = CpuBackend(model, cache, states=states)
    assert backend.wait_until_compiled()
    assert backend.greedy is not None
    own = KVCache(head.arch, 200, 4)
    assert can_compute_head(head, own)
    proposing = HeadModel(head, own, states, no_attention, kernels=CpuHead(head, own))
    engine = Engine(model.arch, backend, num_blocks=200, config=EngineConfig(block_size=4), draft=proposing)
    made, _ = run(engine, some_prompts(8), params)
    greedy = [engine.generate([prompt], params[0])[0].token_ids for prompt in some_prompts(8)[::2]]
    assert made == expected
    assert greedy == expected[::2]
    check_proposals(proposals, head_of(name, model), model)  # its layers are packed by now


class PlainPasses:
    """The passes of a captured round, in plain PyTorch."""

    def __init__(self, model):
        self.head, self._cache = model.head, model.cache
        self.num_tokens = self.head.settings.draft_vocab_size or ARCH.vocab_size
        self.combine, self.draft_logits = self.head.combine, self.head.draft_logits

    def run(self, ids_T, hidden_TE, inputs):
        return self.head(ids_T, hidden_TE, inputs.positions_T, PagedAttention(self._cache, inputs))


class PlainChoice:
    """Sampling by temperature and top-k alone."""

    def set(self, settings):
        self._keys, (self._temperature, self._top_k, *_) = settings.keys_S, settings.numbers

    def run(self, logits_TV, positions_T, next_T):
        number = len(self._keys)
        keys_S, temperature_S = torch.tensor(self._keys), torch.tensor(self._temperature)
        logits_SV = logits_TV[:number]
        scores_SV = logits_SV / temperature_S.where(temperature_S > 0, 1.0).unsqueeze(1)
        for row, top_k in enumerate(self._top_k):
            scores_SV[row, scores_SV[row] < scores_SV[row].topk(int(top_k)).values[-1]] = -torch.inf
        noise_SV = rng.gumbel(keys_S, positions_T[:number] + 1, torch.arange(ARCH.vocab_size), rng.DRAW)
        next_T.zero_()
        next_T[:number] = (scores_SV + noise_SV * (temperature_S > 0).unsqueeze(1)).argmax(-1)


class PlainRounds:
    """Captured rounds without a device that could capture them."""

    def __init__(self, model):
        self._passes, self._width = PlainPasses(model), len(model.states.layers) * ARCH.hidden_size
        self.sizes = set()

    def find(self, num_sequences, num_ahead):
        size = size_for(num_sequences)
        self.sizes.add(size)
        buffers = RoundBuffers(size, num_ahead, 80, torch.device("cpu"))
        states_TX = torch.full((size * (num_ahead + 1), self._width), torch.nan)
        logits_KSD = torch.zeros(num_ahead, size, self._passes.num_tokens)
        return CapturedRound(self._passes, buffers, PlainChoice(), states_TX, logits_KSD)

    def wait_until_compiled(self, timeout_s=None):
        return True

    def close(self):
        pass


def with_rounds(engine):
    """The same engine, whose head runs in captured rounds."""
    speculator = engine._executor._speculator
    proposer = speculator._proposer._other
    rounds = PlainRounds(proposer._model)
    proposer._model = replace(proposer._model, rounds=rounds)
    return rounds


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle3", {"max_num_seqs": 5}),
        ("mtp", {"num_blocks": 40}),
        ("eagle", {"max_step_tokens": 40, "max_num_seqs": 3}),
    ],
    ids=["three sizes", "preempted", "in chunks"],
)
def test_captured_rounds_propose_the_same_and_change_no_text(model, plain, proposals, monkeypatch, name, options):
    """Also where more entries wait than a round takes, and sequences do not want proposals, or have no room left."""
    params, tokens, _ = plain
    turns = itertools.cycle([5, *[0] * 9, 5, 5, 5])
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda *_: next(turns))
    head = head_of(name, model)
    engine = tiny_engine(model, head=head, block_size=16 if name == "eagle" else 4, **options)
    rounds = with_rounds(engine)
    for _ in range(2):
        assert run(engine, PROMPTS, params)[0] == tokens
    assert rounds.sizes
    check_proposals(proposals, head, model)


@pytest.mark.parametrize("bias", [{}, {5: 1.0}], ids=["as drawn", "with changed logits"])
def test_captured_rounds_keep_the_distribution(model, bias):
    """Of the second tokens of many answers; where logits are changed, the head does not know of it."""
    prompt, top_k, temperature = (1, 2, 3, 4, 4, 2, 1, 3), 12, 2.0
    params = SamplingParams(max_tokens=2 + 5, top_k=top_k, temperature=temperature, n=128, logit_bias=bias)
    engine = tiny_engine(model, head=tiny_head("mtp", model), max_num_seqs=64, max_step_tokens=1024)
    with_rounds(engine)
    completions = [each for _ in range(6) for each in engine.generate([[*prompt]], params)]
    assert 0 < sum(c.counts.num_accepted for c in completions) < sum(c.counts.num_drafted for c in completions)

    def chances(ids):
        with torch.inference_mode():
            logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())[-1]).double()
        for token, value in bias.items():
            logits = logits + value * (torch.arange(len(logits)) == token)
        return logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf).div(temperature).softmax(-1)

    first = chances(prompt)
    expected = sum(first[i] * chances((*prompt, i)) for i in first.nonzero().flatten().tolist()) * len(completions)
    found = torch.zeros(ARCH.vocab_size, dtype=torch.float64)
    for completion in completions:
        found[completion.token_ids[1]] += 1
    assert not found[expected == 0].any()
    is_rare = expected < 8
    bins = [torch.cat((x[~is_rare], x[is_rare].sum().view(1))).tolist() for x in (found, expected)]
    assert chi_square_p(*bins) > 1e-4


def test_without_a_seed_the_distribution_is_the_targets(model):
    """The second and third tokens of many answers; the head knows only some of the four that may come."""
    prompt, four = [1, 2, 3, 4, 4, 2, 1, 3], [1, 2, 3, 4]
    params = SamplingParams(max_tokens=3, top_k=4, temperature=2.0, n=128, logit_bias=dict.fromkeys(four, 100.0))
    head = tiny_head("eagle3", model, draft_vocab_size=48)
    engine = tiny_engine(model, head=head, max_num_seqs=64, max_step_tokens=1024)
    completions = [each for _ in range(6) for each in engine.generate([prompt], params)]
    assert 0 < sum(c.counts.num_accepted for c in completions) < sum(c.counts.num_drafted for c in completions)
    pairs = [tuple(completion.token_ids[1:]) for completion in completions]
    expected = dict.fromkeys(itertools.product(four, four), 0.0)
    for ids in itertools.product(four, repeat=3):
        shares = [shares_of(model, (*prompt, *ids[:i]))[ids[i] - 1] for i in range(3)]
        expected[ids[1:]] += math.prod(shares)
    found = [pairs.count(pair) for pair in expected]
    assert sum(found) == len(pairs)
    assert chi_square_p(found, [len(pairs) * each for each in expected.values()]) > 1e-4


def shares_of(model, ids, found={}):  # noqa: B006
    if ids not in found:
        with torch.inference_mode():
            logits = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention())[-1])
        found[ids] = (logits[1:5].double() / 2.0).softmax(-1).tolist()
    return found[ids]


def test_a_head_that_computes_nonsense_does_no_harm(model, plain):
    params, tokens, _ = plain
    head = head_of("eagle3", model)
    head.lm_head.weight.fill_(math.nan)
    engine = tiny_engine(model, head=head)
    assert run(engine, PROMPTS, params)[0] == tokens
    loose = engine.generate(some_prompts(4), SamplingParams(max_tokens=9))
    assert [(len(each.token_ids), each.finish_reason) for each in loose] == [(9, "length")] * 4


def test_a_network_hands_over_nothing_unless_asked(model):
    assert EagerBackend(model, KVCache(model.arch, 4, 4))._states is None
