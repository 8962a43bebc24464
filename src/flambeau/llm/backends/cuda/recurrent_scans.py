"""Prompts of Mamba 2 in Triton: matrix products inside of chunks of tokens; the plain version is `scan_mamba2`.

A program has some rows of a head's state, and goes from chunk to chunk. Steps in which all sequences have one token are
computed by `update_heads`, which gives the same.

Shapes: T tokens of the step · L tokens of a chunk · C channels · H heads · P size of a head · N size of the state
"""

from __future__ import annotations

import triton
import triton.language as tl

from flambeau.llm.backends.cuda.recurrent_numbers import load_sum, silu, softplus, span_of

CHUNK = 64  # tokens
NUMBERS = 8192  # of a state that a program has
MIN_ROWS = 16  # of a product on tensor cores


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def scan_heads(  # type: ignore[no-untyped-def]
    mixed_ptr, projected_ptr, time_bias_ptr, decay_ptr, skip_ptr, states_ptr, slots_ptr, positions_ptr, starts_ptr,
    y_ptr, T, time_scale, gate_scale, low, high,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, STATE_PADDED: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, TIMES_AT: tl.constexpr, ROWS: tl.constexpr,
    GATES: tl.constexpr, CHUNK: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of a head of a sequence; see `update_heads`."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n, each = tl.arange(0, STATE_PADDED), tl.arange(0, CHUNK)
    is_row, is_number = p < SIZE, n < STATE
    b_at = SIZE * HEADS + head // (HEADS // GROUPS) * STATE
    bias, decay = tl.load(time_bias_ptr + head), tl.load(decay_ptr + head)
    skip = tl.load(skip_ptr + head)
    start, end, slot, is_old = span_of(sequence, starts_ptr, slots_ptr, positions_ptr, False)
    at = states_ptr + ((slot * HEADS + head) * SIZE + p)[:, None] * STATE + n[None, :]
    mask = is_row[:, None] & is_number[None, :]
    state = tl.load(at, mask=mask & is_old, other=0.0)
    for first in range(0, end - start, CHUNK):
        t = start + first + each
        is_token = t < end
        time = load_sum(projected_ptr, t * OUTPUTS + TIMES_AT + head, is_token, T * OUTPUTS, PARTS, dtype)
        time = tl.minimum(tl.maximum(softplus(time * time_scale + bias), low), high)
        time = tl.where(is_token, time, 0.0)  # what leaves a state as it is
        total = tl.cumsum(time * decay, 0)
        last = tl.sum(time * decay, 0)
        row = mixed_ptr + t[:, None] * CHANNELS
        has_number = is_token[:, None] & is_number[None, :]
        has_row = is_token[:, None] & is_row[None, :]
        x = tl.load(row + head * SIZE + p[None, :], mask=has_row, other=0.0).to(tl.float32)
        b = tl.load(row + b_at + n[None, :], mask=has_number, other=0.0)
        c = tl.load(row + b_at + GROUPS * STATE + n[None, :], mask=has_number, other=0.0)
        # From the column's token to the row's; later tokens add nothing to earlier ones, where it would overflow.
        between = tl.where(each[:, None] >= each[None, :], total[:, None] - total[None, :], -1.0e30)
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(between) * time[None, :]
        y = tl.dot(c.to(tl.float32), tl.trans(state), input_precision=PRECISION) * tl.exp(total)[:, None]
        y = tl.dot(scores, x, y, input_precision=PRECISION) + x * skip
        left = tl.trans(x * (time * tl.exp(last - total))[:, None])  # of each token at the end of the chunk
        state = tl.dot(left, b.to(tl.float32), state * tl.exp(last), input_precision=PRECISION)
        if GATES:
            gates_at = t[:, None] * OUTPUTS + head * SIZE + p[None, :]
            y *= silu(load_sum(projected_ptr, gates_at, has_row, T * OUTPUTS, PARTS, dtype) * gate_scale)
        y_at = y_ptr + t[:, None] * (HEADS * SIZE) + head * SIZE + p[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=has_row)
    tl.store(at, state, mask=mask & (start < end))


def rows_of(size: int, padded: int) -> int:
    """The rows of a state that a program has, of so many numbers each."""
    return max(MIN_ROWS, min(triton.next_power_of_2(size), NUMBERS // padded))
