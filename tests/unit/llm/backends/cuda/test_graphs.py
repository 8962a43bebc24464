"""Input buffers and steps of CUDA graphs, without a GPU: graphs are functions that run again."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cuda import backend as backends
from flambeau.llm.backends.cuda import graphs, prompt_graphs
from flambeau.llm.backends.cuda.backend import CudaBackend
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.sampling.grammar_masks import mask_logits
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import state_of
from support.llm_steps import BLOCK_SIZE, BLOCKS_EACH, prompts, random_model, room, step_inputs
from support.structured_output import DIGIT, PROMPT, WORD, obj, structured_engine, tokenizer
from support.tiny_models import tiny_hybrid

FORM = {"json": {"type": "array", "items": obj(name=WORD, age=DIGIT), "minItems": 2, "maxItems": 3}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
SAMPLED = SamplingParams(temperature=0.9, top_k=30, seed=5, max_tokens=60)


def test_a_smaller_step_in_the_buffers_of_a_larger_one_gives_its_own_logits():
    model, asked = random_model(), prompts(3)
    forward = EagerBackend(model, room(model, 3))
    forward.prefill(step_inputs({i: (0, ids) for i, ids in enumerate(asked)}), torch.tensor([0]))
    buffers = graphs.InputBuffers(inductor.dummy_inputs(4, 1, 8, torch.device("cpu")))
    everyone = step_inputs({i: (len(ids), [9]) for i, ids in enumerate(asked)}, query_len=1)
    buffers.fill(everyone)
    forward.decode(buffers.inputs)
    last = step_inputs({2: (len(asked[2]) + 1, [4])}, query_len=1)
    expected = forward.decode(last)
    kept = [tensor[1:].clone() for tensor in forward.cache.keys]
    buffers.fill(last)
    torch.testing.assert_close(forward.decode(buffers.inputs)[:1], expected, atol=1e-5, rtol=1e-5)
    assert all(torch.allclose(a, b[1:], atol=1e-5) for a, b in zip(kept, forward.cache.keys, strict=True))


def test_sizes_of_graphs_are_near_the_number_of_sequences():
    assert [graphs.size_for(number) for number in (1, 3, 9, 17, 33, 256)] == [1, 4, 16, 24, 48, 256]
    assert graphs.size_for(257) is None


def test_padding_of_a_step_with_states_changes_only_the_state_for_padding():
    model = tiny_hybrid("mamba2")
    cache = KVCache(model.arch, 1 + 3 * BLOCKS_EACH, BLOCK_SIZE, num_slots=3)
    forward = EagerBackend(model, cache)
    prompt = step_inputs({0: (0, [1, 2, 3]), 1: (0, [4, 5])})
    prompt.state_slots_S = torch.tensor([3, 1])
    forward.prefill(prompt, torch.tensor([0]))
    buffers = graphs.InputBuffers(inductor.dummy_inputs(4, 1, 8, torch.device("cpu"), has_states=True))
    everyone = step_inputs({0: (3, [9]), 1: (2, [8])}, query_len=1)
    everyone.state_slots_S = torch.tensor([3, 1])
    buffers.fill(everyone)
    forward.decode(buffers.inputs)
    states = [state.clone() for layer in cache.states.layers.values() for state in layer]
    last = step_inputs({1: (3, [7])}, query_len=1)
    last.state_slots_S = torch.tensor([1])
    buffers.fill(last)
    assert buffers.inputs.state_slots_S.tolist() == [1, 0, 0, 0]
    found = forward.decode(buffers.inputs)[:1]
    after = [state for layer in cache.states.layers.values() for state in layer]
    assert all(torch.equal(one[2:], other[2:]) for one, other in zip(states, after, strict=True))
    for kept, state in zip(states, after, strict=True):
        state.copy_(kept)
    torch.testing.assert_close(found, forward.decode(last), atol=1e-5, rtol=1e-5)


def test_the_states_of_proposed_tokens_are_kept_beside_padding():
    model = tiny_hybrid("delta_net")
    prompt = step_inputs({0: (0, [1, 2, 3]), 1: (0, [4, 5])})
    prompt.state_slots_S = torch.tensor([3, 1])
    verified = step_inputs({0: (3, [9, 8, 7]), 1: (2, [8, 1, 2])}, query_len=3)
    verified.state_slots_S, verified.state_ends_T = torch.tensor([3, 1]), torch.tensor([3, 4, 5, 1, 6, 7])
    buffers = graphs.InputBuffers(inductor.dummy_inputs(4, 3, 8, torch.device("cpu"), has_states=True))
    buffers.fill(verified)
    assert buffers.inputs.state_ends_T.tolist() == [3, 4, 5, 1, 6, 7, *[0] * 6]
    states = []
    for step in (verified, buffers.inputs):
        cache = KVCache(model.arch, 1 + 3 * BLOCKS_EACH, BLOCK_SIZE, num_slots=3, num_spare=4)
        forward = EagerBackend(model, cache)
        forward.prefill(prompt, torch.tensor([0]))
        forward.decode(step)
        states.append([state[1:] for layer in cache.states.layers.values() for state in layer])
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_sequences_that_fill_up_a_graph_of_prompts_have_no_tokens(monkeypatch):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(prompt_graphs, "capture_graph", lambda run, pool: plain_graph(run))
    seen = []

    def network(inputs, rows_N, tiles):
        seen[:] = [inputs]
        return torch.zeros(len(rows_N), 97)

    graph = prompt_graphs.CapturedPrompts(network, 16, 40, 8, torch.device("cpu"), None, has_states=True)
    for tokens, starts in ({0: (0, [1] * 9), 1: (4, [2] * 7)}, [0, 9, 16]), ({2: (0, [3] * 5)}, [0, 5]):
        inputs = step_inputs(tokens, has_states=True)
        graph.run(inputs, inputs.query_starts[1:] - 1, torch.zeros(1, 3, dtype=torch.int64))
        more = prompt_graphs.MAX_SEQUENCES - len(tokens)
        assert seen[0].query_starts.tolist() == starts + [starts[-1]] * more
        assert seen[0].state_slots_S.tolist() == [1 + each for each in tokens] + [0] * more


@pytest.mark.parametrize("num_tiles", [33, 36])
def test_inputs_of_prompts_have_the_alignment_that_kernels_are_compiled_for(num_tiles, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(prompt_graphs, "capture_graph", lambda run, pool: plain_graph(run))
    seen = []
    device = torch.device("cpu")
    prompt_graphs.CapturedPrompts(
        lambda *given: seen.extend(given) or torch.zeros(1, 97),
        *(8, num_tiles, 8, device, None),
        has_adapters=True,
        has_states=True,
    )
    inputs, rows, tiles = seen
    assert tiles.shape == (num_tiles, 3)
    read = (*inputs.tensors, inputs.adapters_T, rows, tiles)
    assert [each.data_ptr() % 16 for each in read if len(each)] == [0] * 9


class PlainChoice:
    """As `sampling_kernel.TokenChoice`, by the sampler."""

    def __init__(self, num_rows, vocab_size):
        self.chosen_T = torch.zeros(num_rows, dtype=torch.int64)
        self._sampler, self._settings, self._bits = Sampler(vocab_size), None, None

    def set(self, settings):
        self._settings = settings

    def set_masks(self, bits):
        self._bits = bits

    def run(self, logits, positions, next_ids):
        is_sampled = self._settings is not None and not self._settings.is_constrained
        self._choose(logits, positions, next_ids, self._settings if is_sampled else None)

    def run_masked(self, logits, positions, next_ids):
        if self._bits is not None:  # not the first time, before the graph is captured
            rows = slice(len(self._bits))
            logits[rows] = mask_logits(logits[rows].unsqueeze(1), self._bits[:, None], None)[:, 0]
        self._choose(logits, positions, next_ids, self._settings)

    def _choose(self, logits, positions, next_ids, settings):
        num_rows = 0 if settings is None else len(settings.keys_S)
        best = logits[num_rows:].argmax(-1)
        states = [state_of(settings, i, int(positions[i])) for i in range(num_rows)]
        chosen = self._sampler.sample(logits[:num_rows].unsqueeze(1), states).view(-1) if states else best[:0]
        self.chosen_T.copy_(torch.cat([chosen, best]))
        next_ids.copy_(self.chosen_T.clamp(min=0))


def plain_graph(run):
    """A graph that runs as plain PyTorch, and where its results will be."""
    found = run()

    def replay():
        for old, new in zip(found or (), run() or (), strict=True):
            if old is not None:
                old.copy_(new)

    return SimpleNamespace(replay=replay), found


@pytest.fixture
def graph_engine(monkeypatch):
    """An engine whose steps of up to eight sequences are captured, as on a GPU."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    cuda = {
        "device": lambda _: contextlib.nullcontext(),
        "graph_pool_handle": object,
        "current_stream": lambda: stream,
        "Stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "Event": lambda: event,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graphs, "capture_graph", lambda run, pool: plain_graph(run))
    monkeypatch.setattr(CudaBackend, "_on_side_stream", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(CudaBackend, "_build_kernels", lambda self: self._eager.decode)
    monkeypatch.setattr(CudaBackend, "_chooser", lambda self, _, size: PlainChoice(size, self.model.arch.vocab_size))
    monkeypatch.setattr(backends.inductor, "compile_step", lambda model, cache, *_: EagerBackend(model, cache).decode)
    engine = structured_engine(kind=lambda *given: CudaBackend(*given, max_num_seqs=8, max_blocks=64))
    for number in (1, 2, 4, 8):
        engine.generate([PROMPT] * number, max_tokens=3)
    engine.wait_until_compiled()
    engine.generate([PROMPT], max_tokens=3)  # captures
    yield engine
    engine.close()


def test_free_and_constrained_sequences_in_graphs_get_the_tokens_of_plain_steps(graph_engine):
    plain = structured_engine()
    settings = {
        "greedy": GREEDY,
        "sampled": SAMPLED,
        "greedy form": SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=FORM),
        "sampled form": SamplingParams(seed=6, max_tokens=60, structured_outputs=FORM),
        "filtered form": SamplingParams(top_p=0.7, seed=7, max_tokens=40, structured_outputs=FORM),
        "short form": SamplingParams(seed=8, max_tokens=40, structured_outputs={"regex": "[a-d]{3,9}"}),
    }
    expected = {name: plain.generate([PROMPT], params)[0].token_ids for name, params in settings.items()}
    for name, params in settings.items():  # alone, in turns: the settings of a graph change
        assert graph_engine.generate([PROMPT], params)[0].token_ids == expected[name], name
    found = {name: [] for name in settings}
    for name, params in settings.items():
        graph_engine.add(name, [*tokenizer().encode(PROMPT)], params)
    while graph_engine.has_work:
        for output in graph_engine.step():
            found[output.request_id] += output.token_ids
    assert found == expected
    assert {size for _, size in graph_engine._backend._captured} >= {1, 8}
    assert graph_engine.state.num_blocks_used == 0


def test_tokens_of_a_constrained_step_are_not_read_before_they_are_chosen(graph_engine):
    graph_engine.add("one", [*tokenizer().encode(PROMPT)], SamplingParams(seed=1, structured_outputs=FORM))
    for _ in range(3):
        graph_engine.step()
    started = graph_engine._started
    assert started.needs_masks
    with pytest.raises(AssertionError, match="waits for its masks"):
        started.tokens.wait()
    graph_engine.cancel("one")
