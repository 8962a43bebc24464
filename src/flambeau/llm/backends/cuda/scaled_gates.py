"""Gates of feed-forward layers with factors (Falcon H1), in Triton; the plain version is `ScaledMLP`.

Shapes: T tokens of the step · F intermediate · S parts of a sum
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, activated, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.projection import Projection, load_sum
from flambeau.llm.models.architecture import Activation

BLOCK = 1024


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def scale_gates(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, T, gate_scale, scale,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some numbers of a token: the activation of a gate times a factor, and the number that it gates."""
    t = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    wait_for_previous(OVERLAPS)
    gate = load_sum(x_ptr, t * (2 * WIDTH) + i, i < WIDTH, T * (2 * WIDTH), PARTS, dtype)
    up = load_sum(x_ptr, t * (2 * WIDTH) + WIDTH + i, i < WIDTH, T * (2 * WIDTH), PARTS, dtype)
    y = activated(gate * gate_scale, ACTIVATION) * up * scale
    tl.store(y_ptr + t * WIDTH + i, y.to(dtype), mask=i < WIDTH)


def gate_scaled(sums: Tensor, activation: Activation, gate_scale: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Gates and what they gate [T, 2F], or parts [S, T, 2F] of their sums, to [T, F]."""
    x = Projection(sums)
    num_tokens, width = sums.shape[-2], x.width // 2
    y = torch.empty(num_tokens, width, dtype=dtype, device=sums.device)
    launch: Any = scale_gates
    launch[(triton.cdiv(width, BLOCK), num_tokens)](
        sums, y, num_tokens, gate_scale, scale,
        WIDTH=width, PARTS=x.num_parts, ACTIVATION=activation, BLOCK=BLOCK,
        **overlap_options(num_tokens, MAX_ROWS), num_warps=4,
    )  # fmt: skip
    return y
