"""The kernel for one sequence gives what the kernels for any number of them give."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import quantize
from support.llm_steps import random_model

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.backends.cuda.persistent_step import CAPABILITY, PersistentStep, is_faster

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 9.0"),
]
SHAPE = {"vocab_size": 496, "hidden_size": 256, "intermediate_size": 768, "max_length": 512}
HEADS = {
    "many": {"num_heads": 4, "num_kv_heads": 4, "head_size": 64},
    "shared": {"num_heads": 8, "num_kv_heads": 2, "head_size": 128},
}
BLOCK_SIZE = 16


def network(kind, **changes):
    model = random_model(**{**SHAPE, **HEADS["many"], **changes})
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    model = model.to("cuda", torch.bfloat16)
    if kind:
        name, _, group = kind.partition(" in groups of ")
        quantize(model, name, **({"group_size": int(group)} if group else {}))
        use_fast_layers(model, torch.bfloat16)
    return model


def inputs_of(length):
    """A step of one sequence of this length, whose blocks lie anywhere."""
    table = torch.randperm(-(-length // BLOCK_SIZE), device="cuda").view(1, -1) + 1
    slot = table[0, (length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    one, starts = torch.tensor([length], device="cuda"), torch.tensor([0, 1], device="cuda")
    return StepInputs(torch.tensor([17], device="cuda"), one - 1, slot.view(1), starts, one, table, query_len=1)


def caches(model):
    """Two that hold the same rubbish."""
    ours, twin = (KVCache(model.arch, 32, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for one, other in zip((*ours.keys, *ours.values), (*twin.keys, *twin.values), strict=True):
        other.copy_(one.normal_())
    return ours, twin


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4 in groups of 64", "int4 in groups of 128"])
def test_a_step_is_that_of_the_other_kernels(kind, heads):
    model = network(kind, **HEADS[heads])
    cache, twin = caches(model)
    assert is_faster(model, cache) == (kind != "fp8")  # a small network
    with torch.inference_mode():
        step, other = PersistentStep(model, cache), CudaNetwork(model, twin)
        for length in (1, 2, 16, 17, 33, 200, 401):
            inputs = inputs_of(length)
            expected = other.run(inputs)
            found = step.run(inputs).clone()
            assert (found - expected).norm() <= 0.03 * expected.norm()
    for ours, theirs in zip((*cache.keys, *cache.values), (*twin.keys, *twin.values), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"qk_norm": True},
        {"windows": (None, 6)},
        {"unrotated_layers": frozenset({1})},
        {"hidden_size": 320},
        {"vocab_size": 97},
        {"head_size": 32},
    ],
    ids=str,
)
def test_networks_with_more_parts_or_odd_sizes_are_left_to_the_other_kernels(changes):
    model = network("int8", **changes)
    assert not is_faster(model, caches(model)[0])


def test_bfloat16_is_left_to_the_other_kernels():
    model = network(None)
    assert not is_faster(model, caches(model)[0])
