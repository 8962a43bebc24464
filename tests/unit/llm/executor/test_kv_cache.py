"""How large the KV cache is unless the configuration says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError
from flambeau.llm.executor import cache_sizes
from flambeau.llm.executor.cache_sizes import SMALL_BYTES, num_blocks_for, num_rings_for, num_slots_for
from flambeau.llm.executor.kv_cache import KVCache, block_bytes, load
from flambeau.llm.executor.state_cache import StateCache, state_bytes
from flambeau.llm.models.families.recurrence import Recurrence
from support.tiny_models import ARCH

CPU, BLOCK_SIZE = torch.device("cpu"), 16
SMALL = replace(ARCH, num_layers=4, num_heads=8, num_kv_heads=2, head_size=32, max_length=1024)
BLOCK_BYTES = block_bytes(SMALL, BLOCK_SIZE, torch.float32)  # 32 KiB
PLENTY = 64 << 30


@pytest.fixture(autouse=True)
def _plenty_of_memory(monkeypatch):
    pages = {"SC_AVPHYS_PAGES": PLENTY // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(cache_sizes.os, "sysconf", pages.__getitem__)


def cache_bytes(arch=SMALL, *, weight_bytes=0, draft=None, **options) -> int:
    """The size of the cache without block 0."""
    config = EngineConfig(block_size=BLOCK_SIZE, **options)
    num_blocks = num_blocks_for(arch, config, CPU, torch.float32, draft, weight_bytes=weight_bytes) - 1
    return num_blocks * sum(block_bytes(each, BLOCK_SIZE, torch.float32) for each in (arch, draft) if each)


def test_a_small_model_on_a_cpu_has_a_small_cache_although_memory_is_plenty():
    assert cache_bytes(weight_bytes=10 << 20) == SMALL_BYTES
    assert cache_bytes(weight_bytes=10 << 20, max_num_seqs=8) == 8 * 1024 // BLOCK_SIZE * BLOCK_BYTES < SMALL_BYTES


def test_the_cache_of_latent_attention_has_one_latent_and_one_rotated_key_for_each_token():
    """DeepSeek V3: 576 numbers for each token of a layer, instead of 128 heads with 192 + 128."""
    arch = replace(SMALL, num_heads=128, num_kv_heads=1, head_size=512 + 64, latent_size=512, rotary_size=64)
    assert block_bytes(arch, BLOCK_SIZE, torch.float32) == arch.num_layers * BLOCK_SIZE * 576 * 4
    cache = KVCache(arch, 3, BLOCK_SIZE)
    stored = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert stored == 3 * block_bytes(arch, BLOCK_SIZE, torch.float32)


def test_its_draft_has_a_part_of_it():
    assert SMALL_BYTES - 2 * BLOCK_BYTES < cache_bytes(draft=replace(SMALL, num_layers=1)) <= SMALL_BYTES


def test_a_larger_model_has_a_cache_of_the_size_of_its_weights_up_to_the_limit_of_the_host():
    long = replace(SMALL, max_length=32768)
    assert cache_bytes(long, weight_bytes=1 << 30) == 1 << 30
    assert cache_bytes(long, weight_bytes=30 << 30) == 4 << 30


def test_one_sequence_of_full_length_fits():
    long = replace(SMALL, max_length=1 << 20)
    assert cache_bytes(long, weight_bytes=10 << 20) == (1 << 20) // BLOCK_SIZE * BLOCK_BYTES
    assert cache_bytes(long, weight_bytes=10 << 20, max_model_len=2048) == SMALL_BYTES


def test_what_is_configured_holds():
    assert cache_bytes(weight_bytes=10 << 20, kv_cache_bytes=1 << 30) == 256 * 64 * BLOCK_BYTES == 512 << 20
    assert cache_bytes(weight_bytes=10 << 20, num_blocks=9000) == 9000 * BLOCK_BYTES


# ---- states of recurrent layers ----

MAMBA = Recurrence(
    kind="mamba2", layers=frozenset({0, 2}), inner_size=512, num_heads=8, head_size=64, state_size=64, num_groups=1
)
HYBRID = replace(SMALL, recurrence=MAMBA)
PURE = replace(SMALL, recurrence=replace(MAMBA, layers=frozenset(range(4))))


def slots(arch=HYBRID, *, weight_bytes=0, **options) -> int:
    counts = num_slots_for(arch, EngineConfig(block_size=BLOCK_SIZE, **options), CPU, weight_bytes=weight_bytes)
    assert counts.num_spare == 0
    return counts.number


def test_only_layers_with_attention_have_keys_and_values():
    assert block_bytes(HYBRID, BLOCK_SIZE, torch.float32) == BLOCK_BYTES // 2
    assert block_bytes(PURE, BLOCK_SIZE, torch.float32) == 0


def test_the_size_of_a_state_is_that_of_its_tensors():
    cache = StateCache(HYBRID, 3)
    tensors = [tensor for layer in cache.layers.values() for tensor in layer]
    assert sum(tensor.nbytes for tensor in tensors) == 4 * state_bytes(HYBRID)  # slot 0 is for padding


def test_every_sequence_has_a_slot_if_memory_allows_it():
    assert slots(SMALL) == 0
    assert slots(max_num_seqs=8) == 8
    assert slots(PURE, weight_bytes=1 << 30) == 256


def test_fewer_sequences_run_if_their_states_do_not_fit(caplog):
    caplog.set_level("INFO")
    size = state_bytes(HYBRID)
    assert slots(kv_cache_bytes=20 * size) == 10  # half is for blocks
    assert slots(PURE, kv_cache_bytes=20 * state_bytes(PURE)) == 20
    assert "at most 10 sequences run at a time instead of 256 (max_num_seqs)" in caplog.text
    with pytest.raises(LLMError, match=f"set at least {2 * size}"):
        slots(kv_cache_bytes=size)


def test_proposed_tokens_have_states_too(caplog):
    """As many as a step may have; where memory is short, half of the slots."""
    caplog.set_level("INFO")

    def counts(**options):
        config = EngineConfig(block_size=BLOCK_SIZE, speculation="lookup", **options)
        return num_slots_for(HYBRID, config, CPU)

    size = state_bytes(HYBRID)
    assert counts(max_num_seqs=8) == (8, 40)
    assert counts(kv_cache_bytes=2000 * size) == (256, 5 * 42)  # 42 sequences decode with proposals in 512 tokens
    assert counts(kv_cache_bytes=2000 * size, speculate_k=1) == (256, 128)
    assert "states instead of" not in caplog.text
    assert counts(kv_cache_bytes=200 * size, max_num_seqs=70) == (50, 50)
    assert "proposed tokens have 50 states instead of 210" in caplog.text
    assert counts(kv_cache_bytes=200 * size, max_num_seqs=10) == (10, 50)
    assert counts(kv_cache_bytes=2 * size) == (1, 0)
    assert slots(speculate_k=5, max_num_seqs=8) == 8  # without speculation


def test_a_draft_has_states_for_sequences_with_proposals(caplog):
    caplog.set_level("INFO")

    def number(arch=HYBRID, **options):
        return num_rings_for(arch, EngineConfig(block_size=BLOCK_SIZE, draft="given", **options), CPU)

    size = 7 * state_bytes(HYBRID)  # five proposed tokens and two before
    assert number(SMALL) == 0
    assert (number(), number(max_num_seqs=8)) == (42, 8)
    assert number(kv_cache_bytes=40 * size) == 10
    assert "the draft proposes for at most 10 sequences at a time instead of 42" in caplog.text
    assert number(kv_cache_bytes=size) == 0


def test_blocks_get_what_states_leave():
    config = EngineConfig(block_size=BLOCK_SIZE, kv_cache_bytes=100 * BLOCK_BYTES)
    number = num_blocks_for(HYBRID, config, CPU, torch.float32, taken_bytes=40 * BLOCK_BYTES) - 1
    assert number * block_bytes(HYBRID, BLOCK_SIZE, torch.float32) == 60 * BLOCK_BYTES


def test_blocks_without_memory_are_limited_too():
    long = replace(PURE, max_length=1 << 20)
    assert num_blocks_for(long, EngineConfig(block_size=BLOCK_SIZE), CPU, torch.float32) == (1 << 16) + 1


def test_numbers_of_8_bits_are_rounded_and_too_large_ones_become_the_largest():
    cache = KVCache(SMALL, 3, BLOCK_SIZE, dtype=torch.float8_e4m3fn)
    k_TGD = torch.full((2, 2, 32), 1.07)
    k_TGD[1] = -1000.0
    cache.write(1, torch.tensor([BLOCK_SIZE, 2 * BLOCK_SIZE + 3]), k_TGD, k_TGD)
    blocks = load(cache.keys[1], torch.tensor([1, 2]), torch.float32)
    assert torch.equal(blocks[0, 0], torch.full((2, 32), 1.125))
    assert torch.equal(blocks[1, 3], torch.full((2, 32), -448.0))
    assert not cache.keys[0].float().any()
    assert block_bytes(SMALL, BLOCK_SIZE, torch.float8_e4m3fn) == block_bytes(SMALL, BLOCK_SIZE, torch.bfloat16) // 2
