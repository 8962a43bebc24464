"""Norms and gates of recurrent layers, in Triton; the plain versions are in models/recurrent.py.

Shapes: T tokens of the step · I inner channels · R rank of time steps · N size of the state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.projection import Projection, load_sum
from flambeau.llm.backends.cuda.recurrent_sequences import silu


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def normalize_and_gate(  # type: ignore[no-untyped-def]
    y_ptr, gates_ptr, gain_ptr, out_ptr, T, epsilon, gate_scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, SHARED: tl.constexpr, STRIDE: tl.constexpr, OWN_GAINS: tl.constexpr,
    GATES_FIRST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A group of a token's channels, normalized; its gate comes before or after that.

    The gates of SHARED groups are neighbors, those of the next ones are STRIDE apart. With OWN_GAINS, each group has
    weights of its own.
    """
    group, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    e = tl.arange(0, PADDED)
    is_element = e < SIZE
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gain_at = e + (group * SIZE if OWN_GAINS else 0)
    gain = tl.load(gain_ptr + gain_at, mask=is_element, other=0.0).to(tl.float32)
    gate_at = t * OUTPUTS + group // SHARED * STRIDE + FIRST + group % SHARED * SIZE + e
    wait_for_previous(OVERLAPS)
    y = tl.load(y_ptr + (t * GROUPS + group) * SIZE + e, mask=is_element, other=0.0)
    gate = silu(load_sum(gates_ptr, gate_at, is_element, T * OUTPUTS, PARTS, dtype) * gate_scale)
    if GATES_FIRST:
        y *= gate
    y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + epsilon) * gain
    if not GATES_FIRST:
        y *= gate
    tl.store(out_ptr + (t * GROUPS + group) * SIZE + e, y.to(dtype), mask=is_element)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGatedNorm:
    """The norm of a layer's outputs, and their gates, which are outputs of a projection."""

    gain: Tensor  # [I], or of a group
    epsilon: float
    num_groups: int
    gates_first: bool
    first: int = 0  # the column of the gates …
    shared: int = 1  # … of so many groups …
    stride: int = 0  # … and from there to the next ones; 0: all are neighbors
    gate_scale: float = 1.0

    def __call__(self, y_TI: Tensor, gates: Projection) -> Tensor:
        """From float32 to the network's type."""
        num_tokens, inner = y_TI.shape
        size = inner // self.num_groups
        out = torch.empty(num_tokens, inner, dtype=self.gain.dtype, device=y_TI.device)
        padded = triton.next_power_of_2(size)
        launch: Any = normalize_and_gate
        launch[(self.num_groups, num_tokens)](
            y_TI, gates.rows, self.gain, out, num_tokens, self.epsilon, self.gate_scale,
            GROUPS=self.num_groups, SIZE=size, PADDED=padded, OUTPUTS=gates.width, PARTS=gates.num_parts,
            FIRST=self.first, SHARED=self.shared, STRIDE=self.stride or self.shared * size,
            OWN_GAINS=len(self.gain) == inner, GATES_FIRST=self.gates_first,
            **overlap_options(num_tokens, MAX_ROWS), num_warps=max(1, min(8, padded // 256)),
        )  # fmt: skip
        return out


@triton.jit  # type: ignore[untyped-decorator]
def normalized_inside(  # type: ignore[no-untyped-def]
    x, gain_ptr, e, is_element, epsilon, SIZE: tl.constexpr, NORMALIZES: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Numbers after their norm, if they have one, rounded as the network's numbers are."""
    if NORMALIZES:
        gain = tl.load(gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon) * gain
    return x.to(dtype)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def split_parameters(  # type: ignore[no-untyped-def]
    x_ptr, time_gain_ptr, b_gain_ptr, c_gain_ptr, times_ptr, parameters_ptr, T, epsilon,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, STATE: tl.constexpr, STATE_PADDED: tl.constexpr,
    PARTS: tl.constexpr, NORMALIZES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A token's time steps [R], and its B and C [2N] in float32, each normalized if NORMALIZES."""
    t = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = RANK + 2 * STATE
    dtype: tl.constexpr = times_ptr.dtype.element_ty
    r, n = tl.arange(0, RANK_PADDED), tl.arange(0, STATE_PADDED)
    is_rank, is_number = r < RANK, n < STATE
    wait_for_previous(OVERLAPS)
    times = load_sum(x_ptr, t * width + r, is_rank, T * width, PARTS, dtype)
    b = load_sum(x_ptr, t * width + RANK + n, is_number, T * width, PARTS, dtype)
    c = load_sum(x_ptr, t * width + RANK + STATE + n, is_number, T * width, PARTS, dtype)
    times = normalized_inside(times, time_gain_ptr, r, is_rank, epsilon, RANK, NORMALIZES, dtype)
    b = normalized_inside(b, b_gain_ptr, n, is_number, epsilon, STATE, NORMALIZES, dtype)
    c = normalized_inside(c, c_gain_ptr, n, is_number, epsilon, STATE, NORMALIZES, dtype)
    tl.store(times_ptr + t * RANK + r, times, mask=is_rank)
    tl.store(parameters_ptr + t * (2 * STATE) + n, b.to(tl.float32), mask=is_number)
    tl.store(parameters_ptr + t * (2 * STATE) + STATE + n, c.to(tl.float32), mask=is_number)


def split(
    x: Projection, rank: int, gains: tuple[Tensor, Tensor, Tensor] | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Time steps [T, R] in the network's type, and B and C [T, 2N] in float32, of a Mamba 1 layer."""
    num_tokens, size = x.rows.shape[-2], (x.width - rank) // 2
    times = torch.empty(num_tokens, rank, dtype=dtype, device=x.rows.device)
    parameters = torch.empty(num_tokens, 2 * size, dtype=torch.float32, device=x.rows.device)
    launch: Any = split_parameters
    launch[(num_tokens,)](
        x.rows, *(gains or (None, None, None)), times, parameters, num_tokens, epsilon,
        RANK=rank, RANK_PADDED=triton.next_power_of_2(rank), STATE=size, STATE_PADDED=triton.next_power_of_2(size),
        PARTS=x.num_parts, NORMALIZES=gains is not None, **overlap_options(num_tokens, MAX_ROWS), num_warps=1,
    )  # fmt: skip
    return times, parameters
