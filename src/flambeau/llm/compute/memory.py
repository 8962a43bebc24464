"""How many blocks the KV cache gets."""

from __future__ import annotations

import os

import torch

from flambeau.llm.compute.kv_cache import block_bytes
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError, NoRoom
from flambeau.llm.models.architecture import Architecture

HOST_FRACTION = 0.25  # of the memory that is available on a CPU machine, which others need too …
HOST_BYTES = 4 << 30  # … and no more than that, unless told otherwise
RESERVE_BYTES = 1 << 30  # on a GPU: for what a step needs beside weights and cache


def num_blocks_for(
    arch: Architecture,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    draft: Architecture | None = None,
) -> int:
    """As many blocks as the memory allows, but no more than all sequences at their longest could fill."""
    if config.num_blocks is not None:
        return config.num_blocks + 1
    length = min(config.max_model_len or arch.max_length, arch.max_length)
    wanted = config.max_num_seqs * -(-length // config.block_size)
    size_bytes = sum(block_bytes(each, config.block_size, dtype) for each in (arch, draft) if each is not None)
    affordable = available_bytes(arch, config, device) // size_bytes
    if affordable < 1 and config.kv_cache_bytes is not None:
        raise LLMError(f"kv_cache_bytes is {config.kv_cache_bytes}, and one block takes {size_bytes}; raise it")
    if affordable < 1:
        raise NoRoom(
            f"no memory is left on {device} for a single block of the KV cache; use a smaller model, quantization, or "
            "fewer models on this device"
        )
    return min(wanted, affordable) + 1


def available_bytes(arch: Architecture, config: EngineConfig, device: torch.device) -> int:
    """The memory that the cache may take."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading needed for a moment is free
        free, _ = torch.cuda.mem_get_info(device)
        # The graphs of all numbers of sequences keep their logits: about four times those of the largest number.
        logits_bytes = 4 * config.max_num_seqs * arch.vocab_size * torch.float32.itemsize
        return max(0, int(free * config.kv_cache_fraction) - RESERVE_BYTES - logits_bytes)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(available * HOST_FRACTION), HOST_BYTES)
