"""Prompts of Mamba 2 and delta nets in Triton: matrix products inside of chunks; the plain versions are in scans.py.

A program has a part of a head's state, and goes from chunk to chunk. Steps in which all sequences have one token are
computed by `update_heads` and `update_keys`, which give the same.

What a token adds to the state of a delta net depends on what the tokens before it in its chunk have added: a triangular
system. It does not depend on the state, so a kernel inverts the matrices of all chunks beforehand: row by row, as
powers of a matrix lose all digits where keys are alike.

Shapes: T tokens of the step · L tokens of a chunk · M chunks · C channels · H heads · P size of a head · N size of the
state
"""

from __future__ import annotations

import triton
import triton.language as tl

from flambeau.llm.backends.cuda.projection import load_sum
from flambeau.llm.backends.cuda.recurrent_sequences import silu, softplus, span_of

NUMBERS = 4096  # of a state that a program has
CHUNK_NUMBERS = 8192  # of a chunk's B: 64 tokens of 128
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
    tl.debug_barrier()  # another thread may write to these places in the end
    for first in range(0, end - start, CHUNK):
        # Offsets inside of a chunk have 32 bits, which takes fewer registers.
        projected = projected_ptr + (start + first) * OUTPUTS
        row = mixed_ptr + (start + first) * CHANNELS + each[:, None] * CHANNELS
        is_token = each < end - start - first
        time = load_sum(projected, each * OUTPUTS + TIMES_AT + head, is_token, T * OUTPUTS, PARTS, dtype)
        time = tl.minimum(tl.maximum(softplus(time * time_scale + bias), low), high)
        time = tl.where(is_token, time, 0.0)  # what leaves a state as it is
        total = tl.cumsum(time * decay, 0)
        last = tl.sum(time * decay, 0)
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
            gates_at = each[:, None] * OUTPUTS + head * SIZE + p[None, :]
            y *= silu(load_sum(projected, gates_at, has_row, T * OUTPUTS, PARTS, dtype) * gate_scale)
        y_at = y_ptr + (start + first) * (HEADS * SIZE) + each[:, None] * (HEADS * SIZE) + head * SIZE + p[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=has_row)
    tl.store(at, state, mask=mask & (start < end))


@triton.jit
def load_keys(row, at, mask):  # type: ignore[no-untyped-def]
    """Queries or keys [L, N] of a chunk, as vectors of length 1."""
    x = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def load_decays(  # type: ignore[no-untyped-def]
    betas_ptr, times_ptr, first, each, column, is_token, stride, bias, decay, max_beta,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, TIMES_AT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Betas and log-decays [L] of a chunk; 0 for tokens that do not belong to it."""
    at = each * OUTPUTS + column
    beta = load_sum(betas_ptr + first * OUTPUTS, at, is_token, stride, PARTS, dtype)
    time = load_sum(times_ptr + first * OUTPUTS, at + TIMES_AT, is_token, stride, PARTS, dtype)
    beta = tl.where(is_token, max_beta / (1.0 + tl.exp(-beta)), 0.0)
    return beta, tl.where(is_token, decay * softplus(time + bias), 0.0)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def invert_links(  # type: ignore[no-untyped-def]
    mixed_ptr, betas_ptr, times_ptr, time_bias_ptr, decay_ptr, chunks_ptr, starts_ptr, links_ptr, T, max_beta,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PADDED: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr, TIMES_AT: tl.constexpr, CHUNK: tl.constexpr,
    dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse [L, L] of the system of a chunk for one head: a row [L] of each token and head."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(chunks_ptr + 2 * chunk), tl.load(chunks_ptr + 2 * chunk + 1)
    end = tl.load(starts_ptr + sequence + 1)
    n, each = tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    group = head // (HEADS // GROUPS)
    column = group * STRIDE + head % (HEADS // GROUPS)
    is_token = each < end - first
    bias, decay = tl.load(time_bias_ptr + head), tl.load(decay_ptr + head)
    beta, log_decay = load_decays(
        betas_ptr, times_ptr, first, each, column, is_token, T * OUTPUTS, bias, decay, max_beta,
        OUTPUTS, PARTS, TIMES_AT, dtype,
    )  # fmt: skip
    total = tl.cumsum(log_decay, 0)
    row = mixed_ptr + first * CHANNELS + each[:, None] * CHANNELS
    k = load_keys(row, (GROUPS + group) * KEY + n[None, :], is_token[:, None] & (n < KEY)[None, :])
    # Transposed, so that its columns can be taken apart: from the row's token to the column's, which is later.
    between = tl.where(each[:, None] < each[None, :], total[None, :] - total[:, None], -1.0e30)
    links = tl.dot(k, tl.trans(k), input_precision=PRECISION) * tl.exp(between) * beta[None, :]
    inverse = tl.where(each[:, None] == each[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        of_row = tl.sum(tl.where(each[None, :] == i, links, 0.0), 1)
        earlier = tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(each[:, None] == i, inverse - earlier[None, :], inverse)
    at = links_ptr + (first * HEADS + head) * CHUNK + each[:, None] * (HEADS * CHUNK) + each[None, :]
    tl.store(at, inverse, mask=is_token[:, None])


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def scan_keys(  # type: ignore[no-untyped-def]
    mixed_ptr, betas_ptr, times_ptr, time_bias_ptr, decay_ptr, states_ptr, slots_ptr, positions_ptr, starts_ptr,
    links_ptr, y_ptr, T, max_beta, query_scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, KEY: tl.constexpr, KEY_PADDED: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr, TIMES_AT: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of a head of a sequence; see `update_keys`."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    n, each = tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    is_column, is_number = v < SIZE, n < KEY
    group = head // (HEADS // GROUPS)
    column = group * STRIDE + head % (HEADS // GROUPS)
    bias, decay = tl.load(time_bias_ptr + head), tl.load(decay_ptr + head)
    start, end, slot, is_old = span_of(sequence, starts_ptr, slots_ptr, positions_ptr, False)
    at = states_ptr + ((slot * HEADS + head) * KEY + n)[:, None] * SIZE + v[None, :]
    mask = is_number[:, None] & is_column[None, :]
    state = tl.load(at, mask=mask & is_old, other=0.0)
    tl.debug_barrier()  # another thread may write to these places in the end
    for place in range(0, end - start, CHUNK):
        first = start + place
        is_token = each < end - first
        beta, log_decay = load_decays(
            betas_ptr, times_ptr, first, each, column, is_token, T * OUTPUTS, bias, decay, max_beta,
            OUTPUTS, PARTS, TIMES_AT, dtype,
        )  # fmt: skip
        total, last = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        row = mixed_ptr + first * CHANNELS + each[:, None] * CHANNELS
        has_number = is_token[:, None] & is_number[None, :]
        has_column = is_token[:, None] & is_column[None, :]
        q = load_keys(row, group * KEY + n[None, :], has_number) * query_scale
        k = load_keys(row, (GROUPS + group) * KEY + n[None, :], has_number)
        x = tl.load(row + 2 * GROUPS * KEY + head * SIZE + v[None, :], mask=has_column, other=0.0).to(tl.float32)
        links_at = links_ptr + (first * HEADS + head) * CHUNK + each[:, None] * (HEADS * CHUNK) + each[None, :]
        links = tl.load(links_at, mask=is_token[:, None], other=0.0)
        since = tl.exp(total)[:, None]
        missing = (x - since * tl.dot(k, state, input_precision=PRECISION)) * beta[:, None]
        new = tl.dot(links, missing, input_precision=PRECISION)
        between = tl.where(each[:, None] >= each[None, :], total[:, None] - total[None, :], -1.0e30)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(between)
        y = since * tl.dot(q, state, input_precision=PRECISION)
        y = tl.dot(scores, new, y, input_precision=PRECISION)
        left = tl.trans(k * tl.exp(last - total)[:, None])  # of each token at the end of the chunk
        state = tl.dot(left, new, state * tl.exp(last), input_precision=PRECISION)
        y_at = y_ptr + (first * HEADS + head) * SIZE + each[:, None] * (HEADS * SIZE) + v[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=has_column)
    tl.store(at, state, mask=mask & (start < end))


def rows_of(size: int, padded: int) -> int:
    """The rows of a state that a program has, of so many numbers each."""
    return max(MIN_ROWS, min(triton.next_power_of_2(size), NUMBERS // padded))  # type: ignore[no-any-return]


def chunk_of(padded: int) -> int:
    """The tokens of a chunk, for states of so many numbers."""
    return max(MIN_ROWS, min(64, CHUNK_NUMBERS // padded))
