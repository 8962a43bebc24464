"""Attention of one new token of each sequence by a CUDA kernel (csrc/decode_attention.cu); else decode_attention.py.

The kernel is for bfloat16 networks with rotary positions and heads of 128, with a cache in bfloat16 or e4m3. NVRTC
compiles it for each kind of layer.

Shapes: T tokens of the step, one of each sequence · B blocks of the longest · P blocks · K tokens of a block ·
H heads · G key-value heads · D head size · S parts of a sum
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.backends.cuda.attention import ScoreParts
from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.backends.cuda.few_row_kernel import launch_early, runs_on
from flambeau.llm.backends.cuda.rope import HeadParts

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "decode_attention.cu"
SIZE = 128  # of a head
TILE = 16  # places
MAX_GROUP = 8  # heads that share keys and values
MIN_BLOCKS = 256  # of a launch: with fewer, sequences must be split, which only the Triton kernel does
MANY_BLOCKS = 512  # from which on blocks of four warps fill the GPU
TYPES = torch.bfloat16, torch.float8_e4m3fn  # of the cache


def is_supported(
    keys: Tensor, num_heads: int, num_tokens: int, heads: HeadParts, scores: ScoreParts, dtype: torch.dtype
) -> bool:
    """Whether the kernel knows such a layer, and there are enough sequences."""
    block_size, kv_heads, size = keys.shape[1:]
    if dtype != torch.bfloat16 or keys.dtype not in TYPES or size != SIZE or block_size % TILE:
        return False
    if num_heads > MAX_GROUP * kv_heads or num_tokens * kv_heads < MIN_BLOCKS or not runs_on(keys.device):
        return False
    return heads.only_rotates(size) and scores.are_plain


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    tables_TB: Tensor,
    num_heads: int,
    tables: tuple[Tensor, Tensor],
    scale: float,
    window: int,
) -> Tensor | None:
    """As `attend_new_tokens`, with cosine and sine in `tables`; None if the kernel cannot be compiled here.

    It reads parts of projections in float32, and whole ones in bfloat16.
    """
    num_tokens, kv_heads = len(positions_T), keys.shape[2]
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    if qkv.dtype != (torch.bfloat16 if parts == 1 else torch.float32) or not qkv.is_contiguous():
        return None
    num_warps = warps_for(num_tokens * kv_heads)
    is_fp8 = keys.dtype == torch.float8_e4m3fn
    function = compiled(num_heads, kv_heads, keys.shape[1], is_fp8, parts, window, num_warps, keys.device)
    if function is None:
        return None
    out = torch.empty((num_tokens, num_heads, SIZE), dtype=torch.bfloat16, device=keys.device)
    tensors = qkv, keys, values, positions_T, slots_T, tables_TB, *tables, out
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    numbers = [ctypes.c_float(scale), ctypes.c_int(num_tokens), ctypes.c_int(tables_TB.stride(0))]
    launch_early(function, (kv_heads, num_tokens), 32 * num_warps, 0, [*pointers, *numbers])
    return out


def warps_for(num_blocks: int) -> int:
    """Warps of a block, which share the places of a sequence: the best of those measured."""
    return 4 if num_blocks >= MANY_BLOCKS else 8


@functools.cache
def compiled(
    num_heads: int,
    kv_heads: int,
    block_size: int,
    is_fp8: bool,
    parts: int,
    window: int,
    num_warps: int,
    device: torch.device,
) -> Any:
    """The kernel's function on a device; None if it cannot be compiled."""
    numbers = {
        "HEADS": num_heads, "KV_HEADS": kv_heads, "KV_BLOCK": block_size, "FP8": int(is_fp8), "PARTS": parts,
        "WINDOW": window, "NUM_WARPS": num_warps,
    }  # fmt: skip
    source = "".join(f"#define {name} {value}\n" for name, value in numbers.items()) + SOURCE.read_text()
    try:
        return compile_kernel(source, "attend_new_tokens")
    except Exception as error:
        log.warning("attention of decode steps is slower: its kernel cannot be compiled here (%s)", error)
        return None
