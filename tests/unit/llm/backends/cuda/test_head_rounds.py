"""Rounds of a head by the kernels propose what its plain twin does: on a GPU, or by Triton's interpreter.

What is captured when is tested without either.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flambeau.llm.backends.cuda import head_rounds
from flambeau.llm.backends.cuda.graphs import COMPILING
from flambeau.llm.backends.cuda.head_rounds import HeadGraphs, RoundBuffers
from flambeau.llm.backends.eager import EagerBackend, PagedAttention
from flambeau.llm.config import EngineConfig
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.engine import Engine
from flambeau.llm.executor.head import HeadModel, HeadProposer
from flambeau.llm.executor.head_plans import RoundPlan
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.tiny_heads import tiny_head, twin_proposals
from support.tiny_models import ARCH, tiny_engine, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K = 3
KINDS = {
    "eagle3": {"draft_vocab_size": 24},
    "eagle3 with all tokens": {"norm_before_residual": True, "norm_before_projection": True, "norms_output": True},
    "eagle": {"has_bias": True},
    "mtp": {},
    "mtp hidden first": {"hidden_first": True, "has_embeddings": True},
}
LENGTH = 14 if DEVICE.type == "cuda" else 6  # an interpreter is slow
PARAMS = [
    SamplingParams(max_tokens=LENGTH, temperature=0.0),
    SamplingParams(max_tokens=LENGTH, seed=3, top_k=9, top_p=0.9, temperature=0.8),
    SamplingParams(max_tokens=LENGTH, temperature=0.0, repetition_penalty=1.3),
]
SMALL = replace(ARCH, vocab_size=48, hidden_size=32, num_heads=2, num_kv_heads=1, head_size=16, intermediate_size=32)
needs_kernels = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]


@pytest.fixture
def _always(monkeypatch):
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


class Uncaptured:
    """The rounds of `HeadGraphs`, computed without a graph: an interpreter has none."""

    def __init__(self, graphs):
        self._graphs = graphs
        self.num_rounds = 0

    def find(self, num_sequences, num_ahead):
        passes = self._graphs._build_kernels()
        self.num_rounds += 1
        key = num_ahead, head_rounds.size_for(num_sequences)
        return self._graphs._new_round(passes, *key, self._graphs._shared_logits(passes, *key))

    def wait_until_compiled(self, timeout_s=None):
        return True

    def close(self):
        self._graphs.close()


def engine_with(name, model):
    head = tiny_head(name.split()[0], model, **KINDS[name])
    head.to(DEVICE)
    head.target_ids_D = None if head.target_ids_D is None else head.target_ids_D.to(DEVICE)
    config = EngineConfig(block_size=4, speculate_k=K, max_num_seqs=5)
    cache = KVCache(model.arch, 100, 4, device=DEVICE)
    cache.of_head = KVCache(head.arch, 100, 4, device=DEVICE)
    graphs = HeadGraphs(head, model, cache.of_head, max_num_seqs=5, max_blocks=65)
    rounds = graphs if DEVICE.type == "cuda" else Uncaptured(graphs)
    proposing = HeadModel(head, cache.of_head, HiddenStates(head.settings.layers), PagedAttention, rounds)
    backend = EagerBackend(model, cache, states=proposing.states)
    engine = Engine(model.arch, backend, num_blocks=100, config=config, draft=proposing, device=str(DEVICE))
    return engine, rounds


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_kernels) for name in KINDS])
@pytest.mark.usefixtures("_always")
def test_kernels_propose_what_a_plain_twin_does_and_change_no_text(name, monkeypatch):
    prompts = [[5, 9, 2], [7, 1, 30, 4, 11, 3, 8], [1, 2, 3, 4, 5]][: 3 if DEVICE.type == "cuda" else 2]
    plain, params = tiny_model(SMALL), PARAMS
    expected = [[each.token_ids for each in tiny_engine(plain).generate(prompts, one)] for one in params]
    engine, rounds = engine_with(name, tiny_model(SMALL).to(DEVICE))
    torch.manual_seed(5)  # as after other tests: texts are to be repeated then
    if DEVICE.type == "cuda":
        for _ in range(2):
            engine.generate(prompts, params[0])
            engine.wait_until_compiled()
    found, propose = [], HeadProposer.propose

    def is_plain(given):
        return replace(given, seed=None) == params[0]  # the engine gives a seed to requests without one

    def recorded(self, sequences, limits, num_ahead):
        proposal = propose(self, sequences, limits, num_ahead)
        if proposal is not None:
            rows = zip(sequences, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
            found.extend(([*s.tokens], ids[:length]) for s, ids, length in rows if length and is_plain(s.params))
        return proposal

    monkeypatch.setattr(HeadProposer, "propose", recorded)
    assert [[each.token_ids for each in engine.generate(prompts, one)] for one in params] == expected
    twin = tiny_head(name.split()[0], plain, **KINDS[name])
    same = [proposed == twin_proposals(twin, plain, tokens, len(proposed)) for tokens, proposed in found]
    assert len(same) > 3
    assert sum(same) >= 0.95 * len(same)  # the first of almost equal logits may differ
    loose = engine.generate(prompts, SamplingParams(max_tokens=4, top_k=4))
    assert [len(each.token_ids) for each in loose] == [4] * len(prompts)
    assert rounds._captured if DEVICE.type == "cuda" else rounds.num_rounds > 3
    engine.close()


# ---- without kernels ----


def a_plan():
    """Two sequences: of five and of nine tokens, with one and with three entries that wait."""
    return RoundPlan(
        ids_SF=np.array([[7, 0, 0, 0], [4, 5, 6, 0]]),
        positions_SF=np.array([[3, 0, 0, 0], [5, 6, 7, 0]]),
        slots_SF=np.array([[11, 0, 0, 0], [33, 34, 35, 0]]),
        counts_S=np.array([1, 3]),
        starts_S=np.array([3, 5]),
        positions_SJ=np.array([[4, 5], [8, 9]]),
        slots_SJ=np.array([[12, 13], [36, 37]]),
        next_S=np.array([5, 9]),
        tables_SB=np.array([[2, 3, 0], [7, 8, 9]]),
    )


def test_buffers_are_padded_to_their_size():
    buffers = RoundBuffers(4, 3, 6, torch.device("cpu"))
    buffers.fill(a_plan())
    first, second = buffers.inputs(0), buffers.inputs(2)
    assert buffers["ids"].flatten().tolist() == [7, 0, 0, 0, 4, 5, 6, 0, *[0] * 8]
    assert first.positions_T.tolist() == [3, 0, 0, 0, 5, 6, 7, 0, *[0] * 8]
    assert first.block_tables_SB.tolist() == [[2, 3, 0, 0, 0, 0], [7, 8, 9, 0, 0, 0], [0] * 6, [0] * 6]
    assert (first.query_len, second.query_len) == (4, 1)
    assert second.positions_T.tolist() == [5, 9, 0, 0]
    assert second.slots_T.tolist() == [13, 37, 0, 0]
    assert buffers["rows"].flatten().tolist() == [0, 0, 0, 0, 1, 2, 3, 0, *[0] * 8]
    assert buffers["last"].tolist() == [0, 6, 0, 0]
    assert buffers["before"].tolist() == [[4, 8, 0, 0], [5, 9, 0, 0], [6, 10, 0, 0]]
    only = replace(a_plan(), **{name: getattr(a_plan(), name)[1:] for name in RoundPlan.__slots__})
    buffers.fill(only)
    assert buffers["ids"].flatten().tolist() == [4, 5, 6, 0, *[0] * 12]
    assert buffers.inputs(0).block_tables_SB[0].tolist() == [7, 8, 9, 0, 0, 0]
    assert buffers["last"].tolist() == [2, 0, 0, 0]


class StandIn:
    """A round that counts."""

    def __init__(self, *shape):
        self.shape = shape

    def capture(self, pool):
        return self

    def compute(self):
        pass


@pytest.fixture
def graphs(monkeypatch):
    cuda = {"device": lambda _: contextlib.nullcontext(), "graph_pool_handle": object, "current_stream": object}
    for name, value in {**cuda, "set_stream": lambda _: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(head_rounds.SideStream, "running", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(HeadGraphs, "_new_round", lambda self, passes, *shape: StandIn(*shape[:2]))
    model = tiny_model()
    head = tiny_head("mtp", model)
    passes = type("Passes", (), {"num_tokens": ARCH.vocab_size})()
    monkeypatch.setattr(HeadGraphs, "_build_kernels", lambda self: passes)
    made = HeadGraphs(head, model, KVCache(head.arch, 4, 4), max_num_seqs=8, max_blocks=4)
    assert made.wait_until_compiled(60)
    yield made
    made.close()


def test_a_round_is_captured_when_it_was_compiled_and_a_larger_one_will_do_meanwhile(graphs, monkeypatch):
    assert graphs.find(5, K) is None
    assert graphs.wait_until_compiled(60)
    assert graphs.find(5, K).shape == (K, 8)
    monkeypatch.setattr(graphs._compiler, "find", lambda key, _: graphs if key == "kernels" else None)
    assert graphs.find(2, K).shape == (K, 8)
    assert graphs.find(2, K + 1) is None
    assert graphs.find(9, K) is None


def test_no_round_is_captured_while_a_compiler_runs(graphs):
    graphs.find(1, K)
    assert graphs.wait_until_compiled(60)
    with COMPILING:
        assert graphs.find(1, K) is None
    assert graphs.find(1, K) is not None


def test_a_round_without_kernels_is_left_to_plain_pytorch(monkeypatch, caplog):
    pytest.importorskip("triton", reason="there is no Triton here")
    model = tiny_model(replace(ARCH, logit_softcap=20.0))
    head = tiny_head("mtp", model)
    caplog.set_level("INFO")
    made = HeadGraphs(head, model, KVCache(head.arch, 4, 4), max_num_seqs=8, max_blocks=4)
    assert made.wait_until_compiled(60)
    assert made.find(1, K) is None
    assert "the kernels do not know logit_softcap" in caplog.text
    made.close()


def test_tokens_that_were_drawn_without_a_grammar_are_not_given_the_probabilities_of_one(monkeypatch):
    proposer, params = HeadProposer.__new__(HeadProposer), SamplingParams()
    proposer._sampler = Sampler(SMALL.vocab_size, eos_ids=[0], device="cpu")
    monkeypatch.setattr(proposer._sampler, "scores", lambda logits, states: logits)
    proposer._head = SimpleNamespace(to_target_tokens=lambda logits: logits)
    drawn = SimpleNamespace(logits_SKD=torch.zeros(1, K, SMALL.vocab_size))
    free, constrained = (
        SamplingState(params, 1, [1], 1),
        SamplingState(params, 1, [1], 1, grammar=SimpleNamespace(error="")),
    )
    assert proposer._probabilities(drawn, [free]) is not None
    assert proposer._probabilities(drawn, [constrained]) is None
