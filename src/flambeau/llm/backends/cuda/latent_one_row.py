"""The products around attention over latents for one token, in Triton; their plain version is in latent_attention.py.

Weights are read before the kernel waits for its inputs. The second product also merges the splits of attention.

Shapes: H heads · R latent · N numbers of a head that are not rotated · P rotated ones · V value of a head · S splits
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous

COLUMNS = 64  # of latents that a program computes
VALUES = 16  # of a head that a program computes
MERGED = 8  # splits that are merged at a time


@triton.jit(do_not_specialize=["head_stride"])  # type: ignore[untyped-decorator]
def multiply_queries(  # type: ignore[no-untyped-def]
    q_ptr, weight_ptr, y_ptr, head_stride, SIZE: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, R: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some columns of the product of a head's query, without its rotated part, and the weights that make keys."""
    head = tl.program_id(0)
    n = tl.arange(0, PADDED)
    r = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = weight_ptr + head * (head_stride * 8) + n[:, None] * R + r[None, :]
    weights = tl.load(at, mask=(n < N)[:, None] & (r < R)[None, :], other=0.0)
    wait_for_previous(OVERLAPS)
    q = tl.load(q_ptr + head * SIZE + n, mask=n < N, other=0.0).to(tl.float32)
    y = tl.sum(weights.to(tl.float32) * q[:, None], 0)
    tl.store(y_ptr + head * R + r, y.to(y_ptr.dtype.element_ty), mask=r < R)


@triton.jit(do_not_specialize=["head_stride"])  # type: ignore[untyped-decorator]
def merge_and_multiply(  # type: ignore[no-untyped-def]
    sums_ptr, highs_ptr, totals_ptr, positions_ptr, weight_ptr, y_ptr, head_stride, V: tl.constexpr,
    VALUES: tl.constexpr, R: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, PLACES: tl.constexpr,
    MERGED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some values of a head: its splits are merged and multiplied with the weights that make values."""
    head = tl.program_id(0)
    v = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    r, is_latent = tl.arange(0, PADDED), tl.arange(0, PADDED) < R
    at = weight_ptr + head * (head_stride * 8) + v[:, None] * R + r[None, :]
    weights = tl.load(at, mask=(v < V)[:, None] & is_latent[None, :], other=0.0)
    end = tl.load(positions_ptr).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(end, SPLITS), PLACES) * PLACES
    num_used = tl.cdiv(end, share)  # the others have no places
    wait_for_previous(OVERLAPS)
    high = tl.full([], -1.0e30, tl.float32)
    total = tl.zeros([], tl.float32)
    y = tl.zeros([PADDED], tl.float32)
    for start in range(0, num_used, MERGED):
        split = start + tl.arange(0, MERGED)
        is_split = split < num_used
        highs = tl.load(highs_ptr + head * SPLITS + split, mask=is_split, other=-1.0e30)
        totals = tl.load(totals_ptr + head * SPLITS + split, mask=is_split, other=0.0)
        sums_at = sums_ptr + (head * SPLITS + split)[:, None] * R + r[None, :]
        sums = tl.load(sums_at, mask=is_split[:, None] & is_latent[None, :], other=0.0)
        higher = tl.maximum(high, tl.max(highs, 0))
        shares = tl.exp(highs - higher)
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(totals * shares, 0)
        y = y * shrink + tl.sum(sums * shares[:, None], 0)
        high = higher
    dtype = y_ptr.dtype.element_ty
    y = (y / total).to(dtype).to(tl.float32)
    values = tl.sum(weights.to(tl.float32) * y[None, :], 1)
    tl.store(y_ptr + head * V + v, values.to(dtype), mask=v < V)


def latent_queries(q_HD: Tensor, to_keys_HNR: Tensor) -> Tensor:
    """The queries [H, 1, R] that meet latents, from those [H, N+P] of one token."""
    heads, size, latent = to_keys_HNR.shape
    y = torch.empty((heads, 1, latent), dtype=q_HD.dtype, device=q_HD.device)
    launch: Any = multiply_queries
    launch[(heads, triton.cdiv(latent, COLUMNS))](
        q_HD, to_keys_HNR, y, to_keys_HNR.stride(0) // 8, SIZE=q_HD.shape[1], N=size,
        PADDED=triton.next_power_of_2(size), R=latent, COLUMNS=COLUMNS, **overlap_options(1), num_warps=4,
    )  # fmt: skip
    return y


def values_of_splits(
    splits: tuple[Tensor, Tensor, Tensor], positions_T: Tensor, to_values_HVR: Tensor, places: int, dtype: torch.dtype
) -> Tensor:
    """The values [1, H·V] of one token from its sums [1, H, S, R], highest scores and totals [1, H, S].

    A split has a multiple of so many places.
    """
    heads, size, latent = to_values_HVR.shape
    y = torch.empty((1, heads * size), dtype=dtype, device=to_values_HVR.device)
    launch: Any = merge_and_multiply
    launch[(heads, triton.cdiv(size, VALUES))](
        *splits, positions_T, to_values_HVR, y, to_values_HVR.stride(0) // 8, V=size, VALUES=VALUES, R=latent,
        PADDED=triton.next_power_of_2(latent), SPLITS=splits[0].shape[2], PLACES=places, MERGED=MERGED,
        **overlap_options(1), num_warps=4,
    )  # fmt: skip
    return y


def has_kernels(to_keys_HNR: Tensor, to_values_HVR: Tensor) -> bool:
    """Whether heads begin at aligned addresses."""
    return all(each.stride(0) % 8 == 0 and each.storage_offset() % 8 == 0 for each in (to_keys_HNR, to_values_HVR))
