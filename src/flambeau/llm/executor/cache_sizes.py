"""How many blocks of keys and values, and slots of states, fit into the memory that is left."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError, NoRoom
from flambeau.llm.executor.kv_cache import block_bytes
from flambeau.llm.executor.state_cache import state_bytes
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.speculation.speculator import max_batch

logger = logging.getLogger(__name__)

HOST_FRACTION = 0.25  # of the available memory of a CPU machine, which other processes need too …
HOST_BYTES = 4 << 30  # … up to this limit, unless kv_cache_bytes is set
SMALL_BYTES = 128 << 20  # on a CPU: what the cache of even the smallest model may take
MAX_EMPTY_BLOCKS = 1 << 16  # of a network without attention: a million tokens in blocks of 16
RESERVE_BYTES = 1 << 30  # on a GPU: for what a step needs beside weights and cache


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
