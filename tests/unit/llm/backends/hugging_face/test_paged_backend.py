"""What a network must not depend on if its keys and values are in blocks."""

from __future__ import annotations

import functools

import pytest
import torch

from flambeau.llm.backends.hugging_face.attention import NotPageable
from flambeau.llm.backends.hugging_face.backend_choice import check_paged, find_layers
from flambeau.llm.backends.hugging_face.causal_model import CausalModel
from flambeau.llm.models.architecture import Architecture
from support.other_networks import VOCAB_SIZE, other_network

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "intermediate_size": 48}


def counting(forward):
    """Scale logits by the number of tokens in the cache, as Llama 4 scales queries from a length on."""

    @functools.wraps(forward)
    def wrapped(*args, past_key_values=None, **options):
        outputs = forward(*args, past_key_values=past_key_values, **options)
        length = 0 if past_key_values is None else past_key_values.get_seq_length()
        outputs.logits = outputs.logits * (2.0 if length > 8192 else 1.0)
        return outputs

    return wrapped


def test_logits_that_depend_on_the_length_of_a_cache_are_found():
    network, arch = other_network("Arcee"), Architecture(vocab_size=VOCAB_SIZE, **SIZES)
    with torch.inference_mode():
        model = CausalModel(network)
        check_paged(model, arch, find_layers(model, arch))
        network.set_attn_implementation("sdpa")
        network.forward = counting(network.forward)
        model = CausalModel(network)
        with pytest.raises(NotPageable, match="number of tokens in its cache"):
            check_paged(model, arch, find_layers(model, arch))
    assert network.config._attn_implementation == "sdpa"
