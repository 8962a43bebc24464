"""Attention whose queries come with gates for its outputs (Qwen3-Next), in Triton: what is before and after it.

Shapes: T tokens of the step · H heads · G key-value heads · D head size · S parts of a sum
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.projection import Projection, load_sum

BLOCK = 1024


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def take_apart(  # type: ignore[no-untyped-def]
    x_ptr, qkv_ptr, gates_ptr, T,
    QUERIES: tl.constexpr, REST: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some projections of a token: each head's query, then its gate; then keys and values."""
    t = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width: tl.constexpr = 2 * QUERIES + REST
    is_number = i < width
    wait_for_previous(OVERLAPS)
    x = load_sum(x_ptr, t * width + i, is_number, T * width, PARTS, qkv_ptr.dtype.element_ty)
    x = x.to(qkv_ptr.dtype.element_ty)
    is_query = i < 2 * QUERIES
    is_gate = is_query & (i % (2 * SIZE) >= SIZE)
    place = i // (2 * SIZE) * SIZE + i % SIZE
    qkv_at = t * (QUERIES + REST) + tl.where(is_query, place, i - QUERIES)
    tl.store(qkv_ptr + qkv_at, x, mask=is_number & (is_gate == 0))
    tl.store(gates_ptr + t * QUERIES + place, x, mask=is_gate)


@triton.jit  # type: ignore[untyped-decorator]
def gate_outputs(y_ptr, gates_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some outputs of a token's attention times the sigmoids of their gates."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * WIDTH + i
    wait_for_previous(OVERLAPS)
    y = tl.load(y_ptr + at, mask=i < WIDTH, other=0.0).to(tl.float32)
    gate = tl.load(gates_ptr + at, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (y / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=i < WIDTH)


def without_gates(projections: Tensor, queries: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Projections [T, (2H+2G)·D], or parts of them, as [T, (H+2G)·D] and the gates [T, H·D]; `queries` is H·D."""
    x = Projection(projections)
    num_tokens, rest = projections.shape[-2], x.width - 2 * queries
    qkv = torch.empty(num_tokens, queries + rest, dtype=dtype, device=projections.device)
    gates = torch.empty(num_tokens, queries, dtype=dtype, device=projections.device)
    launch: Any = take_apart
    launch[(triton.cdiv(x.width, BLOCK), num_tokens)](
        projections, qkv, gates, num_tokens, QUERIES=queries, REST=rest, SIZE=size, PARTS=x.num_parts, BLOCK=BLOCK,
        **overlap_options(num_tokens, MAX_ROWS), num_warps=4,
    )  # fmt: skip
    return qkv, gates


def gated(y: Tensor, gates: Tensor) -> Tensor:
    """The outputs [T, H·D] of attention times the sigmoids of their gates."""
    out = torch.empty_like(gates)
    launch: Any = gate_outputs
    launch[(triton.cdiv(gates.shape[1], BLOCK), len(gates))](
        y, gates, out, WIDTH=gates.shape[1], BLOCK=BLOCK, **overlap_options(len(gates), MAX_ROWS), num_warps=4
    )
    return out
