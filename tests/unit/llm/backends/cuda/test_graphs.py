"""Input buffers of CUDA graphs, without a GPU."""

from __future__ import annotations

import torch

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cuda import graphs
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.kv_cache import KVCache
from support.llm_steps import BLOCK_SIZE, BLOCKS_EACH, prompts, random_model, room, step_inputs
from support.tiny_models import tiny_hybrid


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
