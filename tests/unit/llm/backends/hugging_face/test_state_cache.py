"""States of sequences in one cache, and back."""

from __future__ import annotations

import torch

from flambeau.llm.backends.hugging_face.causal_model import CausalModel, SequenceState, cached_bytes
from support.other_networks import other_network


def test_states_are_stacked_and_taken_out_again():
    from flambeau.llm.backends.hugging_face.state_cache import stack, take

    model = CausalModel(other_network("Mamba2"))
    states = [SequenceState(model) for _ in range(3)]
    with torch.inference_mode():
        for i, state in enumerate(states):
            state.run(torch.arange(3, 8 + i))
        stacked = stack([state.cache for state in states])
        assert cached_bytes(stacked) == 3 * cached_bytes(states[0].cache)
        again = take(stacked, 1)
    layer, expected = again["cache_params"].layers[0], states[1].cache["cache_params"].layers[0]
    assert torch.equal(layer.conv_states[0], expected.conv_states[0])
    assert torch.equal(layer.recurrent_states[0], expected.recurrent_states[0])
    assert layer.conv_states[0].data_ptr() != stacked["cache_params"].layers[0].conv_states[0][1:].data_ptr()
    assert cached_bytes(again) == cached_bytes(states[1].cache)


def test_keys_are_handed_on_and_not_kept():
    from flambeau.llm.backends.hugging_face.state_cache import without_keys

    model = CausalModel(other_network("FalconH1"))
    cache = without_keys(model.new_cache())["past_key_values"]
    keys, values = torch.ones(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    for _ in range(2):
        found = cache.update(keys, values, 0)
        assert found[0] is keys
        assert found[1] is values
    assert cached_bytes(cache) == 0
