"""The CPU attention kernel gives what plain attention gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.cpu import attention, bindings
from flambeau.llm.backends.eager import EagerBackend, PagedAttention
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.attention import AttentionOptions
from support.llm_steps import greedy, prompts, random_model, room, step_inputs

needs_kernels = pytest.mark.usefixtures("loaded")
pytestmark = pytest.mark.timeout(300)  # the kernels may have to be built, on a busy machine


CASES = {
    "decode": {0: (11, [1]), 1: (0, [2]), 2: (30, [3])},
    "verify": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "verify fewer than the others": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "chunks of prompts": {0: (0, [1] * 7), 1: (5, [2] * 22), 2: (8, [3])},
}


def attend(kind, model, cache, inputs, window):
    """The output of one layer for random queries, keys and values, which are always the same ones."""
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    shape = (len(inputs.ids_T), arch.num_heads + 2 * arch.num_kv_heads, arch.head_size)
    dtype = cache.keys[0].dtype
    qkv = torch.randn(shape, generator=generator).to(dtype if dtype.is_floating_point else torch.float32)
    q, k, v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    return kind(cache, inputs)(1, q, k, v, AttentionOptions(arch.head_size**-0.5, window))


def check_decode(model):
    """The kernel attends in a decode step as its twin does."""
    cache = room(model, 3, rubbish=1.0)
    inputs = step_inputs(CASES["decode"], query_len=1)
    expected = attend(PagedAttention, model, copy_of(model, cache), inputs, None)
    found = attend(attention.CpuAttention, model, cache, inputs, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def copy_of(model, cache: KVCache, dtype=torch.float32) -> KVCache:
    """A cache with the same contents."""
    copy = KVCache(model.arch, cache.num_blocks, cache.block_size, dtype=dtype)
    for ours, theirs in zip((*copy.keys, *copy.values), (*cache.keys, *cache.values), strict=True):
        ours.copy_(theirs)
    return copy


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_cpu_kernel_attends_and_keeps_as_its_twin_does(case, num_kv_heads, window):
    model = random_model(head_size=32, num_kv_heads=num_kv_heads)
    cache = room(model, 3, rubbish=1.0)
    twin = copy_of(model, cache)
    inputs = step_inputs(CASES[case], query_len=4 if "verify" in case else 0)
    if "fewer" in case:  # the rest is padding: at the first place, and kept where nobody looks
        inputs.positions_T[6:] = inputs.slots_T[6:] = 0
    found = attend(attention.CpuAttention, model, cache, inputs, window)
    expected = attend(PagedAttention, model, twin, inputs, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.keys[1], twin.keys[1])
    assert torch.equal(cache.values[1], twin.values[1])


@needs_kernels
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 128, 256, 512, 8, 40, 120, 192])
def test_the_cpu_kernel_serves_every_head_size(head_size):
    check_decode(random_model(head_size=head_size))


@needs_kernels
@pytest.mark.parametrize("head_size", [16, 64, 20])
@pytest.mark.parametrize("case", ["decode", "chunks of prompts"])
def test_a_cache_of_int8_is_written_and_read_as_by_its_twin(case, head_size):
    model = random_model(head_size=head_size)
    cache = empty_int8_cache(model)
    twin = empty_int8_cache(model)
    filled = step_inputs({i: (0, [1] * 30) for i in range(3)})
    inputs = step_inputs(CASES[case])
    for each, kind in ((cache, attention.CpuAttention), (twin, PagedAttention)):
        attend(kind, model, each, filled, None)
    found, expected = (
        attend(kind, model, each, inputs, 9) for each, kind in ((cache, attention.CpuAttention), (twin, PagedAttention))
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.keys[1], twin.keys[1])
    assert torch.equal(cache.values[1], twin.values[1])


def empty_int8_cache(model) -> KVCache:
    template = room(model, 3)
    return KVCache(model.arch, template.num_blocks, template.block_size, dtype=torch.int8)


@needs_kernels
def test_a_cache_of_int8_costs_about_a_hundredth_of_the_output():
    model = random_model(head_size=64)
    outputs = []
    for cache in (room(model, 3), empty_int8_cache(model)):
        attend(attention.CpuAttention, model, cache, step_inputs({i: (0, [1] * 30) for i in range(3)}), None)
        outputs.append(attend(attention.CpuAttention, model, cache, step_inputs({0: (29, [1])}), None))
    assert 0 < (outputs[1] - outputs[0]).norm() / outputs[0].norm() < 0.01


@needs_kernels
def test_a_bfloat16_cache_is_summed_in_float32():
    model = random_model(head_size=32)
    cache = room(model, 3, rubbish=1.0, dtype=torch.bfloat16)
    inputs = step_inputs(CASES["chunks of prompts"])
    wide = copy_of(model, cache)  # the same numbers, so that the twin differs by nothing but its last rounding
    found = attend(attention.CpuAttention, model, cache, inputs, 6)
    rounded = copy_of(model, wide)
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    qkv = torch.randn((30, arch.num_heads + 2 * arch.num_kv_heads, 32), generator=generator).bfloat16().float()
    q, k, v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    expected = PagedAttention(rounded, inputs)(1, q, k, v, AttentionOptions(32**-0.5, 6))
    torch.testing.assert_close(found, expected.bfloat16(), atol=1e-6, rtol=2**-7)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("head_size", "window"), [(32, None), (64, 6), (64, None), (96, 40), (128, None), (256, 9)])
def test_long_prompts_are_as_exact_as_single_tokens(head_size, window, dtype):
    """With AMX, queries and weights are two numbers of 8 bits each: nearly what float32 gives."""
    model = random_model(head_size=head_size, num_heads=6, num_kv_heads=2)
    cache = KVCache(model.arch, 21, 16, dtype=dtype)
    qkv = torch.randn((300, 10, head_size), generator=torch.Generator().manual_seed(2))
    options = AttentionOptions(head_size**-0.5, window)

    def outputs(sizes):
        found = []
        for places in torch.arange(300).split(sizes):
            starts, length = torch.tensor([0, len(places)]), places[-1:] + 1
            inputs = StepInputs(places, places, 16 + places, starts, length, torch.arange(1, 21).view(1, -1))
            parts = qkv[places].split([6, 2, 2], dim=1)
            found.append(attention.CpuAttention(cache, inputs)(1, *parts, options))
        return torch.cat(found)

    whole = outputs([300])
    torch.testing.assert_close(whole, outputs([1] * 300), atol=5e-5, rtol=5e-5)
    assert torch.equal(outputs([17, 16, 27, 240]), whole)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_are_rounded_to_the_nearest_numbers_of_the_cache(dtype):
    model = random_model(head_size=16, num_heads=2, num_kv_heads=2)
    cache, inputs = room(model, 1, rubbish=0.0, dtype=dtype), step_inputs({0: (0, [1] * 30)})
    k = torch.randn(30, 2, 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 6, 30).view(-1, 1, 1)
    tie = 1 + torch.finfo(dtype).eps / 2
    k[0, 0, :4] = torch.tensor([tie, -tie, 1.5 * torch.finfo(dtype).smallest_normal * 2**-5, -0.0])
    attention.CpuAttention(cache, inputs)(1, torch.zeros(30, 2, 16), k, -k, AttentionOptions(1.0))
    for cached, numbers in ((cache.keys[1], k), (cache.values[1], -k)):
        assert torch.equal(
            cached.view(-1, 2, 16)[inputs.slots_T].view(torch.int16), numbers.to(dtype).view(torch.int16)
        )


@needs_kernels
def test_a_sequence_gets_the_same_bits_alone_and_among_others():
    model = random_model(head_size=32)
    cache = room(model, 3, rubbish=1.0)
    inputs = step_inputs(CASES["verify"], query_len=4)
    together = attend(attention.CpuAttention, model, copy_of(model, cache), inputs, None)
    first = step_inputs({0: CASES["verify"][0]}, query_len=4)
    assert torch.equal(attend_first(model, copy_of(model, cache), first, 8), together[:4])


def attend_first(model, cache, inputs, num_drawn):
    """As `attend`, for the first tokens of so many that are drawn."""
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    qkv = torch.randn((num_drawn, arch.num_heads + 2 * arch.num_kv_heads, arch.head_size), generator=generator)
    parts = qkv[: len(inputs.ids_T)].split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    return attention.CpuAttention(cache, inputs)(1, *parts, AttentionOptions(arch.head_size**-0.5))


@needs_kernels
@pytest.mark.parametrize("head_size", [16, 32, 64])
def test_groups_of_any_number_of_heads_are_served(head_size):
    check_decode(random_model(head_size=head_size, num_heads=7, num_kv_heads=1))


@needs_kernels
def test_a_model_says_the_same_with_the_kernels_as_without(monkeypatch):
    model, asked = random_model(head_size=16), prompts(4)
    with_kernels = greedy(EagerBackend(model, room(model, 4), attention.choose_attention), asked, 8)
    monkeypatch.setattr(bindings.kernels, "library", None)
    assert greedy(EagerBackend(model, room(model, 4), attention.choose_attention), asked, 8) == with_kernels


@needs_kernels
def test_long_prompts_and_other_heads_go_through_the_twin():
    model = random_model(head_size=8)
    assert isinstance(attention.choose_attention(room(model, 1), step_inputs(CASES["decode"], 1)), PagedAttention)
    model = random_model(head_size=32)
    inputs = step_inputs({0: (0, [1] * 20)})
    inputs = replace(inputs, ids_T=torch.ones(attention.MAX_PROMPT + 1, dtype=torch.long))
    assert isinstance(attention.choose_attention(room(model, 1), inputs), PagedAttention)
