"""A norm and the linear layer after it for one row, in one Triton kernel; the plain version is norm.py and linear.py.

Each program normalizes the row again, which takes less time than a launch. Weights are read before the row is there.

Shapes: N outputs · K inputs · S parts of a sum
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.norm import NormParameters

MAX_SIZE = 2048  # inputs: with more, nobody has measured whether it is faster
EACH, NUM_WARPS = 4, 4  # outputs of a program: 2 to 8, with 2 to 8 warps, are about as fast


@triton.jit  # type: ignore[untyped-decorator]
def normalize_and_multiply(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, gain_ptr, kept_ptr, weight_ptr, other_ptr, bias_ptr, y_ptr, epsilon, residual_scale,
    N: tl.constexpr, OTHERS: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a sum to the residual stream, normalize it, and multiply some outputs.

    After the N outputs of the layer come the OTHERS of a second one.
    """
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    k = tl.arange(0, PADDED)
    is_output, is_input = n < N, k < K
    rows = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    weights = tl.load(rows, mask=is_output[:, None] & is_input[None, :], other=0.0, eviction_policy="evict_first")
    if OTHERS > 0:
        is_other = (n >= N) & (n < N + OTHERS)
        rows = other_ptr + (n - N)[:, None].to(tl.int64) * K + k[None, :]
        others = tl.load(rows, mask=is_other[:, None] & is_input[None, :], other=0.0, eviction_policy="evict_first")
        weights = tl.where(is_other[:, None], others, weights)
        is_output = n < N + OTHERS
    gain = tl.load(gain_ptr + k, mask=is_input, other=0.0)
    wait_for_previous(OVERLAPS)
    x = tl.load(x_ptr + k, mask=is_input, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(sums_ptr + part * K + k, mask=is_input, other=0.0).to(tl.float32) * residual_scale
    kept = x.to(x_ptr.dtype.element_ty)
    x = kept.to(tl.float32)
    if tl.program_id(0) == 0:  # not in place: the other programs read it, too
        tl.store(kept_ptr + k, kept, mask=is_input)
    root = tl.rsqrt(tl.sum(x * x, 0) / K + epsilon)
    y = tl.sum(weights.to(tl.float32) * (x * gain.to(tl.float32))[None, :], 1) * root
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


def is_joinable(norm: NormParameters, linear: Any) -> bool:
    """Whether the kernel knows the norm and the layer."""
    if type(linear) is not KernelLinear or linear.gates or linear.activation is not None:
        return False
    return norm.is_plain and linear.scale is None and linear.size <= MAX_SIZE


def is_plain(linear: Any) -> bool:
    """Whether a layer has a matrix and nothing else."""
    return type(linear) is KernelLinear and linear.bias is None and linear.scale is None


def multiply_normalized(
    x: Tensor, sums: Tensor | None, norm: NormParameters, linear: KernelLinear, other: KernelLinear | None = None
) -> tuple[Tensor, Tensor]:
    """The residual stream [1, K] after the sums [1, K] or [S, 1, K] were added, and the outputs [1, N] of its norm.

    Those of the other layer follow.
    """
    num_others = 0 if other is None else other.width
    width, size = linear.width + num_others, linear.size
    kept, y = torch.empty_like(x), torch.empty((1, width), dtype=x.dtype, device=x.device)
    launch: Any = normalize_and_multiply
    launch[(triton.cdiv(width, EACH),)](
        x, sums, norm.gain, kept, linear.weight, None if other is None else other.weight, linear.bias, y,
        norm.epsilon, norm.residual_scale,
        N=linear.width, OTHERS=num_others, K=size, PADDED=triton.next_power_of_2(size), EACH=EACH,
        PARTS=0 if sums is None else sums.numel() // x.numel(), HAS_BIAS=linear.bias is not None,
        **overlap_options(1), num_warps=NUM_WARPS,
    )  # fmt: skip
    return kept, y
