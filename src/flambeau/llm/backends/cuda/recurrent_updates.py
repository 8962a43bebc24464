"""States that go from token to token, in Triton; the plain versions are in scans.py.

A program has a part of a sequence's state in registers, and computes the tokens of the sequence one after the other:
one in a decode step. The state is read and written in its slot. With ENDS, where proposed tokens are verified, the
state after each token is written to a slot of its own.

Shapes: T tokens of the step · C channels · H heads · P size of a head of values · N size of the state
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.projection import load_sum
from flambeau.llm.backends.cuda.recurrent_sequences import Sequences, silu, softplus, span_of

NUMBERS = 4096  # of a state that a program has
NUM_WARPS = 4


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def update_heads(  # type: ignore[no-untyped-def]
    mixed_ptr, projected_ptr, time_bias_ptr, decay_ptr, skip_ptr, states_ptr, slots_ptr, positions_ptr, starts_ptr,
    ends_ptr, y_ptr, T, time_scale, gate_scale, low, high,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, STATE_PADDED: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, TIMES_AT: tl.constexpr, ROWS: tl.constexpr,
    GATES: tl.constexpr, ONE: tl.constexpr, ENDS: tl.constexpr, dtype: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Mamba 2: some rows of a head of a sequence, from convolved x, B and C [T, C] and projected time steps.

    With GATES, the first outputs of the projection gate what is stored.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, STATE_PADDED)
    is_row, is_number = p < SIZE, n < STATE
    b_at = SIZE * HEADS + head // (HEADS // GROUPS) * STATE
    bias, decay = tl.load(time_bias_ptr + head), tl.load(decay_ptr + head)
    skip = tl.load(skip_ptr + head)
    start, end, slot, is_old = span_of(sequence, starts_ptr, slots_ptr, positions_ptr, ONE)
    place = (head * SIZE + p)[:, None] * STATE + n[None, :]
    size: tl.constexpr = HEADS * SIZE * STATE  # of a slot
    mask = is_row[:, None] & is_number[None, :]
    is_any = start < end
    wait_for_previous(OVERLAPS)
    state = tl.load(states_ptr + slot * size + place, mask=mask & is_old, other=0.0)
    tl.debug_barrier()  # another thread may write to these places in the end
    for number in range(end - start):
        t = start + number
        if ENDS:
            slot = tl.load(ends_ptr + t).to(tl.int64)
        projected = projected_ptr + t * OUTPUTS
        time = load_sum(projected, TIMES_AT + head, is_any, T * OUTPUTS, PARTS, dtype) * time_scale
        time = tl.minimum(tl.maximum(softplus(time + bias), low), high)
        row = mixed_ptr + t * CHANNELS
        x = tl.load(row + head * SIZE + p, mask=is_row, other=0.0).to(tl.float32)
        b = tl.load(row + b_at + n, mask=is_number, other=0.0).to(tl.float32)
        c = tl.load(row + b_at + GROUPS * STATE + n, mask=is_number, other=0.0).to(tl.float32)
        state = state * tl.exp(time * decay) + (time * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + x * skip
        if GATES:
            y *= silu(load_sum(projected, head * SIZE + p, is_row, T * OUTPUTS, PARTS, dtype) * gate_scale)
        tl.store(y_ptr + t * (HEADS * SIZE) + head * SIZE + p, y.to(y_ptr.dtype.element_ty), mask=is_row)
        if ENDS:
            tl.store(states_ptr + slot * size + place, state, mask=mask)
    if not ENDS:
        tl.store(states_ptr + slot * size + place, state, mask=mask & is_any)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def update_channels(  # type: ignore[no-untyped-def]
    mixed_ptr, projected_ptr, times_ptr, parameters_ptr, decay_ptr, skip_ptr, states_ptr, slots_ptr, positions_ptr,
    starts_ptr, ends_ptr, y_ptr, T,
    CHANNELS: tl.constexpr, STATE: tl.constexpr, STATE_PADDED: tl.constexpr, OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr, TIME_PARTS: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, ENDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Mamba 1: some channels of a sequence, from convolved x [T, C], time steps [T, C], and B and C [T, 2N].

    The second half of the projection's outputs gates what is stored.
    """
    sequence = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, STATE_PADDED)
    is_channel, is_number = i < CHANNELS, n < STATE
    mask = is_channel[:, None] & is_number[None, :]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    decay = tl.load(decay_ptr + i[:, None] * STATE + n[None, :], mask=mask, other=0.0)
    skip = tl.load(skip_ptr + i, mask=is_channel, other=0.0)
    start, end, slot, is_old = span_of(sequence, starts_ptr, slots_ptr, positions_ptr, ONE)
    place = i[:, None] * STATE + n[None, :]
    size: tl.constexpr = CHANNELS * STATE  # of a slot
    is_any = start < end
    wait_for_previous(OVERLAPS)
    state = tl.load(states_ptr + slot * size + place, mask=mask & is_old, other=0.0)
    tl.debug_barrier()  # another thread may write to these places in the end
    for number in range(end - start):
        t = start + number
        if ENDS:
            slot = tl.load(ends_ptr + t).to(tl.int64)
        time = softplus(load_sum(times_ptr, t * CHANNELS + i, is_channel, T * CHANNELS, TIME_PARTS, dtype))
        x = tl.load(mixed_ptr + t * CHANNELS + i, mask=is_channel, other=0.0).to(tl.float32)
        b = tl.load(parameters_ptr + t * (2 * STATE) + n, mask=is_number, other=0.0)
        c = tl.load(parameters_ptr + t * (2 * STATE) + STATE + n, mask=is_number, other=0.0)
        state = state * tl.exp(time[:, None] * decay) + (time * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + x * skip
        y *= silu(load_sum(projected_ptr, t * OUTPUTS + CHANNELS + i, is_channel, T * OUTPUTS, PARTS, dtype))
        tl.store(y_ptr + t * CHANNELS + i, y.to(dtype), mask=is_channel)
        if ENDS:
            tl.store(states_ptr + slot * size + place, state, mask=mask)
    if not ENDS:
        tl.store(states_ptr + slot * size + place, state, mask=mask & is_any)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def update_keys(  # type: ignore[no-untyped-def]
    mixed_ptr, betas_ptr, times_ptr, time_bias_ptr, decay_ptr, states_ptr, slots_ptr, positions_ptr, starts_ptr,
    ends_ptr, y_ptr, T, max_beta, query_scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, KEY: tl.constexpr, KEY_PADDED: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr, TIMES_AT: tl.constexpr,
    COLUMNS: tl.constexpr, ONE: tl.constexpr, ENDS: tl.constexpr, dtype: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The gated delta rule: some columns of a head of a sequence, from convolved queries, keys and values [T, C].

    Betas and time steps of the heads that share a key are neighbors; those of the next key are STRIDE apart.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, KEY_PADDED)
    is_column, is_number = v < SIZE, n < KEY
    shared: tl.constexpr = HEADS // GROUPS
    keys: tl.constexpr = GROUPS * KEY
    group = head // shared
    column = group * STRIDE + head % shared
    bias, decay = tl.load(time_bias_ptr + head), tl.load(decay_ptr + head)
    start, end, slot, is_old = span_of(sequence, starts_ptr, slots_ptr, positions_ptr, ONE)
    place = (head * KEY + n)[:, None] * SIZE + v[None, :]
    size: tl.constexpr = HEADS * SIZE * KEY  # of a slot
    mask = is_number[:, None] & is_column[None, :]
    is_any = start < end
    wait_for_previous(OVERLAPS)
    state = tl.load(states_ptr + slot * size + place, mask=mask & is_old, other=0.0)
    tl.debug_barrier()  # another thread may write to these places in the end
    for number in range(end - start):
        t = start + number
        if ENDS:
            slot = tl.load(ends_ptr + t).to(tl.int64)
        beta = load_sum(betas_ptr, t * OUTPUTS + column, is_any, T * OUTPUTS, PARTS, dtype)
        time = load_sum(times_ptr, t * OUTPUTS + TIMES_AT + column, is_any, T * OUTPUTS, PARTS, dtype)
        beta = max_beta / (1.0 + tl.exp(-beta))
        row = mixed_ptr + t * CHANNELS
        q = tl.load(row + group * KEY + n, mask=is_number, other=0.0).to(tl.float32)
        k = tl.load(row + keys + group * KEY + n, mask=is_number, other=0.0).to(tl.float32)
        x = tl.load(row + 2 * keys + head * SIZE + v, mask=is_column, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * query_scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state *= tl.exp(decay * softplus(time + bias))
        new = (x - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * new[None, :]
        y = tl.sum(state * q[:, None], 0)
        tl.store(y_ptr + t * (HEADS * SIZE) + head * SIZE + v, y.to(y_ptr.dtype.element_ty), mask=is_column)
        if ENDS:
            tl.store(states_ptr + slot * size + place, state, mask=mask)
    if not ENDS:
        tl.store(states_ptr + slot * size + place, state, mask=mask & is_any)


def new_outputs(like: Tensor, width: int, dtype: torch.dtype, sequences: Sequences) -> Tensor:
    """Room for outputs [T, width]; of prompts zeros, as nobody computes those of padding."""
    shape = sequences.num_tokens, width
    if sequences.has_one_each:
        return torch.empty(shape, dtype=dtype, device=like.device)
    return torch.zeros(shape, dtype=dtype, device=like.device)


def rows_of(size: int, padded: int) -> int:
    """The rows of a state that a program has, of so many numbers each."""
    return max(1, min(triton.next_power_of_2(size), NUMBERS // padded))  # type: ignore[no-any-return]


def launch_options(sequences: Sequences) -> dict[str, Any]:
    return {
        "ONE": sequences.has_one_each,
        "ENDS": sequences.ends_T is not None,
        **overlap_options(sequences.num_tokens, MAX_ROWS),
        "num_warps": NUM_WARPS,
    }
