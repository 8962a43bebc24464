"""KVCache: the keys and values of every layer, in blocks; and how many blocks the memory allows.

Where keys and values are computed from latents (MLA), the cache holds these as keys, and no values. A contiguous
cache is one whose blocks are as long as a sequence: there is no second kind. In a cache of int8, the D numbers of a
head are followed by their scale, a float32 in four bytes.

Shapes: L layers · P blocks · K tokens of a block · G key-value heads · D head size · T tokens
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError, NoRoom
from flambeau.llm.executor.huge_pages import zeros_in_huge_pages
from flambeau.llm.executor.state_cache import StateCache, state_bytes
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.speculation.speculator import max_batch

logger = logging.getLogger(__name__)

HOST_FRACTION = 0.25  # of the available memory of a CPU machine, which other processes need too …
HOST_BYTES = 4 << 30  # … up to this limit, unless kv_cache_bytes is set
SMALL_BYTES = 128 << 20  # on a CPU: what the cache of even the smallest model may take
MAX_EMPTY_BLOCKS = 1 << 16  # of a network without attention: a million tokens in blocks of 16
RESERVE_BYTES = 1 << 30  # on a GPU: for what a step needs beside weights and cache


class KVCache:
    """Tensors [P, K, G, D] of keys and of values for each layer; of latents there are no values.

    Block 0 is for padding and belongs to no sequence. With int8 they are [P, K, G, D + 4]: see `to_int8`. Recurrent
    layers have a state for each of `num_slots` sequences instead, and `num_spare` for proposed tokens.
    """

    def __init__(
        self,
        arch: Architecture,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_slots: int = 0,
        num_spare: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.head_size = num_blocks, block_size, arch.head_size
        self.states = StateCache(arch, num_slots, num_spare, device=device)
        own = [arch.of_layer(layer) for layer in range(arch.num_layers)]
        shapes = [
            # Recurrent layers have no keys and values; others read those of another layer.
            (num_blocks if number in arch.caching_layers else 0, block_size, one.num_kv_heads)
            for number, one in enumerate(own)
        ]
        self.keys = [
            zeros((*shape, key_room(one, dtype)), device, dtype) for shape, one in zip(shapes, own, strict=True)
        ]
        self.is_latent = arch.keys_are_values
        self.values = [
            zeros((*shape, size_in(dtype, one.output_size)), device, dtype)
            for shape, one in zip(shapes, own, strict=True)
            if not self.is_latent
        ]
        sizes = {layer: arch.index_size(layer) for layer in range(arch.num_layers)}
        self.index_keys = {  # of indexers, which choose what is attended to
            layer: zeros((num_blocks, block_size, 1, size_in(dtype, size)), device, dtype)
            for layer, size in sizes.items()
            if size
        }
        self.entries: dict[int, Tensor] = {}  # keys that stand for several tokens, in the blocks of the last of them
        self.index_entries: dict[int, Tensor] = {}  # what indexers compare
        for layer, of_block, size, index_size in entry_sizes(arch, block_size):
            self.entries[layer] = zeros((num_blocks, of_block, 1, size_in(dtype, size)), device, dtype)
            if index_size:
                shape = num_blocks, of_block, 1, size_in(dtype, index_size)
                self.index_entries[layer] = zeros(shape, device, dtype)
        self.of_head: KVCache | None = None  # in the same blocks: what a head keeps, which prefixes are shared with

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that a block holds; the first dimension of each tensor is the block."""
        more = *self.index_keys.values(), *self.entries.values(), *self.index_entries.values()
        own = [tensor for tensor in (*self.keys, *self.values, *more) if len(tensor)]
        return own if self.of_head is None else own + self.of_head.tensors

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store keys and values; a slot is block times block size plus offset."""
        store(self.keys[layer], slots_T, k_TGD)
        if not self.is_latent:
            store(self.values[layer], slots_T, v_TGD)


def entry_sizes(arch: Architecture, block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Layers with compressed entries: how many a block has, and the numbers of one for attention and for an indexer."""
    shape = arch.compression
    for layer in sorted(shape.compressing_layers) if shape is not None else ():
        assert shape is not None
        index_size = shape.index_size if layer in shape.overlapping_layers else 0
        yield layer, shape.entries_of_block(layer, block_size), arch.head_size, index_size


def store(cached: Tensor, slots_T: Tensor, new_TGD: Tensor) -> None:
    """Write numbers to their slots of [P, K, G, D]; those that a narrow type cannot hold become its largest."""
    if cached.dtype == torch.int8:
        cached.flatten(0, 1).index_copy_(0, slots_T, to_int8(new_TGD))
        return
    if cached.dtype.itemsize > 1:
        cached.flatten(0, 1).index_copy_(0, slots_T, new_TGD.to(cached.dtype))
        return
    limit = torch.finfo(cached.dtype).max
    bits_TGD = new_TGD.clamp(-limit, limit).to(cached.dtype).view(torch.uint8)
    cached.view(torch.uint8).flatten(0, 1).index_copy_(0, slots_T, bits_TGD)  # not every device indexes float8


def load(cached: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The contents of these blocks […, K, G, D] in another type."""
    if cached.dtype == torch.int8:
        return from_int8(cached[blocks], dtype)
    if cached.dtype.itemsize > 1:
        return cached[blocks].to(dtype)
    return cached.view(torch.uint8)[blocks].view(cached.dtype).to(dtype)


SCALE_BYTES = 4
INT8_MAX = 127


def key_room(arch: Architecture, dtype: torch.dtype) -> int:
    """How many numbers of the cache's type the key of a head takes."""
    return size_in(dtype, arch.head_size)


def head_room(arch: Architecture, dtype: torch.dtype) -> int:
    """How many numbers of the cache's type the key and the value of a head take; some keys are values."""
    return key_room(arch, dtype) + (0 if arch.keys_are_values else size_in(dtype, arch.output_size))


def size_in(dtype: torch.dtype, size: int) -> int:
    """How many numbers of the cache's type so many take, with their scale."""
    return size + (SCALE_BYTES if dtype == torch.int8 else 0)


def to_int8(x: Tensor) -> Tensor:
    """Numbers […, D] as [..., D + 4]: the largest number of a head is 127 steps, and the scale follows."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 1e-30, wide * (INT8_MAX / largest), 0.0).round()
    return torch.cat((steps.to(torch.int8), (largest / INT8_MAX).view(torch.int8)), dim=-1)


def from_int8(cached: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers […, D] of what is cached."""
    scale = cached[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (cached[..., :-SCALE_BYTES].float() * scale).to(dtype)


def zeros(shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the device."""
    if torch.device(device).type == "cpu":
        # A new sequence gets the lowest blocks: in huge pages, its first token would touch 2 MB in every tensor.
        return zeros_in_huge_pages(shape, dtype, first_is_small=True)
    return torch.zeros(shape, device=device, dtype=dtype)


def block_bytes(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    """The size of one block in all layers."""
    own = [arch.of_layer(layer) for layer in arch.caching_layers]
    num_numbers = sum(one.num_kv_heads * head_room(one, dtype) for one in own)
    num_numbers += sum(size_in(dtype, size) for size in map(arch.index_size, range(arch.num_layers)) if size)
    of_entries = sum(
        of_block * sum(size_in(dtype, size) for size in sizes if size)
        for _, of_block, *sizes in entry_sizes(arch, block_size)
    )
    return (num_numbers * block_size + of_entries) * dtype.itemsize


def num_blocks_for(
    arch: Architecture,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    draft: Architecture | None = None,
    *,
    weight_bytes: int = 0,
    taken_bytes: int = 0,
) -> int:
    """As many blocks as the memory allows, but no more than all sequences at full length need; block 0 included.

    On a CPU the cache is no larger than `weight_bytes`, one sequence of full length or SMALL_BYTES, whichever is
    most: fewer sequences run at a time there, and the memory belongs to other processes as well. `taken_bytes` of the
    memory belong to states. Blocks of a network without attention take no memory: they only count tokens.
    """
    size_bytes = sum(block_bytes(each, config.block_size, dtype) for each in (arch, draft) if each is not None)
    return num_blocks_of(size_bytes, arch, config, device, weight_bytes=weight_bytes, taken_bytes=taken_bytes)


def num_blocks_of(
    size_bytes: int,
    arch: Architecture,
    config: EngineConfig,
    device: torch.device,
    *,
    weight_bytes: int,
    taken_bytes: int = 0,
) -> int:
    """`num_blocks_for` with blocks of this size."""
    if config.num_blocks is not None:
        return config.num_blocks + 1
    length = min(config.max_model_len or arch.max_length, arch.max_length)
    sequence_blocks = -(-length // config.block_size)
    wanted = config.max_num_seqs * sequence_blocks
    if not size_bytes:
        return min(wanted, max(sequence_blocks, MAX_EMPTY_BLOCKS)) + 1
    if device.type == "cpu" and config.kv_cache_bytes is None:
        wanted = min(wanted, max(sequence_blocks, max(weight_bytes, SMALL_BYTES) // size_bytes))
    affordable = max(0, available_bytes(arch, config, device) - taken_bytes) // size_bytes
    if affordable < 1 and config.kv_cache_bytes is not None:
        raise LLMError(f"kv_cache_bytes is {config.kv_cache_bytes}, and one block takes {size_bytes}; raise it")
    if affordable < 1:
        raise NoRoom(
            f"no memory is left on {device} for a single block of the KV cache; use a smaller model, quantization, or "
            "fewer models on this device"
        )
    return min(wanted, affordable) + 1


class SlotCounts(NamedTuple):
    """Slots for states: of sequences and snapshots, and spare ones for proposed tokens."""

    number: int
    num_spare: int


def num_slots_for(
    arch: Architecture, config: EngineConfig, device: torch.device, *, weight_bytes: int = 0
) -> SlotCounts:
    """As many slots for states as sequences may run, if the memory allows it; 0 for a network without states.

    A network with attention too leaves half of the memory to its blocks. On a CPU, the limits of blocks apply. With
    speculation, up to half of the slots are spare ones where there are not enough for all.
    """
    size = state_bytes(arch)
    if not size:
        return SlotCounts(0, 0)
    wanted = num_spare_wanted(config)
    available = available_bytes(arch, config, device)
    if device.type == "cpu" and config.kv_cache_bytes is None:
        least = 1 + min(wanted, config.speculate_k)  # one sequence can run, and have proposals
        available = min(available, max(weight_bytes, SMALL_BYTES, 2 * least * size))
    affordable = available // size // (2 if arch.attending_layers else 1)
    if affordable < 1 and config.kv_cache_bytes is not None:
        raise LLMError(
            f"kv_cache_bytes is {config.kv_cache_bytes}, and the state of one sequence takes {size}, beside blocks; "
            f"set at least {2 * size}"
        )
    if affordable < 1:
        raise NoRoom(
            f"no memory is left on {device} for the state of a single sequence, which takes {size / 1e6:.1f} MB; use a "
            "smaller model, quantization, or fewer models on this device"
        )
    num_spare = min(wanted, max(affordable // 2, affordable - config.max_num_seqs))
    number = min(config.max_num_seqs, affordable - num_spare)
    if number < config.max_num_seqs:
        logger.info(
            "at most %d sequences run at a time instead of %d (max_num_seqs): each has a state of %.1f MB; raise "
            "kv_cache_bytes for more",
            number,
            config.max_num_seqs,
            size / 1e6,
        )
    if num_spare < wanted:
        logger.info(
            "proposed tokens have %d states instead of %d, so that fewer sequences have proposals at a time; raise "
            "kv_cache_bytes for more",
            num_spare,
            wanted,
        )
    return SlotCounts(number, num_spare)


def num_spare_wanted(config: EngineConfig) -> int:
    """How many proposed tokens a step may have, each of which needs a state of its own."""
    if config.speculation is None and not config.draft:
        return 0
    return config.speculate_k * most_drafting(config)


def most_drafting(config: EngineConfig) -> int:
    """How many sequences may have proposals at a time."""
    return min(config.max_num_seqs, max_batch(config.max_step_tokens, config.speculate_k))


def ring_length(config: EngineConfig) -> int:
    """How many states of a sequence a draft needs, so that it can go on from the last token that was accepted."""
    return config.speculate_k + 2


def num_rings_for(draft: Architecture, config: EngineConfig, device: torch.device) -> int:
    """For how many sequences a draft with recurrent layers has states; they take a quarter of the memory at most."""
    ring_bytes = ring_length(config) * state_bytes(draft)
    if not ring_bytes:
        return 0
    wanted, affordable = most_drafting(config), available_bytes(draft, config, device) // 4 // ring_bytes
    if affordable < wanted:
        logger.info(
            "the draft proposes for at most %d sequences at a time instead of %d: its states of each take %.1f MB",
            *(affordable, wanted, ring_bytes / 1e6),
        )
    return min(wanted, affordable)


def available_bytes(arch: Architecture, config: EngineConfig, device: torch.device) -> int:
    """The memory that the cache may take."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()  # loading needed more for a moment
        free, _ = torch.cuda.mem_get_info(device)
        # The graphs of all batch sizes keep their logits: about four times those of the largest.
        logits_bytes = 4 * config.max_num_seqs * arch.vocab_size * torch.float32.itemsize
        return max(0, int(free * config.kv_cache_fraction) - RESERVE_BYTES - logits_bytes)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(available * HOST_FRACTION), HOST_BYTES)
