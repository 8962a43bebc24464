"""Convolutions over the last tokens of each channel, in Triton; the plain version is `scans.convolve`.

The window of a sequence, its last inputs, is kept in float32. It is read and written in its slot: where every sequence
has one token, by the kernel that computes it, else by a second one, after all that read it. Where each token has a slot
for the state after it, the slot that a sequence comes from may be that of its first token only.

Shapes: T tokens of the step · C channels · W width of a convolution · N outputs of the projection before it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.projection import Projection, load_sum
from flambeau.llm.backends.cuda.recurrent_sequences import Sequences, silu, span_of

BLOCK = 256  # channels of a program
TOKENS = 8  # of a program, in prompts


@triton.jit  # type: ignore[untyped-decorator]
def source_columns(  # type: ignore[no-untyped-def]
    c, FIRST: tl.constexpr, KEYS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUES: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Where the inputs of channels c are among the outputs of the projection.

    With KEYS, those are grouped by key head, STRIDE apart: a query, a key, and VALUES numbers of values.
    """
    if KEYS > 0:
        of_key = (c - KEYS) // KEY_SIZE * STRIDE + KEY_SIZE + c % KEY_SIZE
        of_value = (c - 2 * KEYS) // VALUES * STRIDE + 2 * KEY_SIZE + (c - 2 * KEYS) % VALUES
        column = tl.where(c < KEYS, c // KEY_SIZE * STRIDE + c % KEY_SIZE, tl.where(c < 2 * KEYS, of_key, of_value))
    else:
        column = FIRST + c
    return column


@triton.jit  # type: ignore[untyped-decorator]
def load_inputs(  # type: ignore[no-untyped-def]
    x_ptr, at, scale, mask, stride, CHANNELS: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The inputs of a convolution. With GATED, the first of three numbers CHANNELS apart gates the last."""
    x = load_sum(x_ptr, at, mask, stride, PARTS, dtype)
    if GATED:
        x = (x * load_sum(x_ptr, at + 2 * CHANNELS, mask, stride, PARTS, dtype)).to(dtype).to(tl.float32)
    if SCALED:
        x = (x * scale).to(dtype).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def convolve_tokens(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, scales_ptr, windows_ptr, slots_ptr, positions_ptr, starts_ptr, sequences_ptr, y_ptr, T,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr,
    KEYS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUES: tl.constexpr, STRIDE: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, ONE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some channels of some tokens. With ONE, each token is a sequence, and its window moves on.

    The outputs are activated; with GATED, they are multiplied with the second of three inputs instead.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_channel, is_token = c < CHANNELS, t < T
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    column = source_columns(c, FIRST, KEYS, KEY_SIZE, VALUES, STRIDE)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales_ptr + c, mask=is_channel, other=0.0)[None, :]
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=is_channel, other=0.0).to(tl.float32)
    if ONE:
        sequence, start = t, t
    else:
        sequence = tl.load(sequences_ptr + t, mask=is_token, other=0)
        start = tl.load(starts_ptr + sequence, mask=is_token, other=0)
    slot = tl.load(slots_ptr + sequence, mask=is_token, other=0).to(tl.int64)
    is_old = tl.load(positions_ptr + start, mask=is_token, other=0) > 0
    window_at = windows_ptr + (slot[:, None] * CHANNELS + c[None, :]) * (WIDTH - 1)
    place = t - start
    mask = is_token[:, None] & is_channel[None, :]
    wait_for_previous(OVERLAPS)
    y = tl.zeros([TOKENS, BLOCK], tl.float32) + bias[None, :]
    for w in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + c * WIDTH + w, mask=is_channel, other=0.0).to(tl.float32)
        before = place + (w - WIDTH + 1)  # the place of this input; before 0, it is in the window
        at = (t + (w - WIDTH + 1))[:, None] * OUTPUTS + column[None, :]
        x = load_inputs(
            x_ptr, at, scale, mask & (before >= 0)[:, None], T * OUTPUTS, CHANNELS, PARTS, GATED, SCALED, dtype
        )  # fmt: skip
        if w < WIDTH - 1:
            is_kept = mask & ((before < 0) & is_old)[:, None]
            x += tl.load(window_at + (before + (WIDTH - 1))[:, None], mask=is_kept, other=0.0)
        if ONE and w > 0:  # what is at this place was read in the turn before, perhaps by another thread
            tl.debug_barrier()
            tl.store(window_at + (w - 1), x, mask=mask)
        y += x * weight[None, :]
    if GATED:
        y = y.to(dtype).to(tl.float32)
        y *= load_sum(x_ptr, t[:, None] * OUTPUTS + (column + CHANNELS)[None, :], mask, T * OUTPUTS, PARTS, dtype)
    else:
        y = silu(y)
    tl.store(y_ptr + t[:, None] * CHANNELS + c[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def keep_windows(  # type: ignore[no-untyped-def]
    x_ptr, scales_ptr, windows_ptr, slots_ptr, positions_ptr, starts_ptr, ends_ptr, y_ptr, T,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr,
    KEYS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUES: tl.constexpr, STRIDE: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The last inputs of some channels of a sequence, which the next token needs; `y_ptr` only has the type.

    With ENDS, those after each token, to its own slot.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    column = source_columns(c, FIRST, KEYS, KEY_SIZE, VALUES, STRIDE)
    start, end, slot, is_old = span_of(tl.program_id(1), starts_ptr, slots_ptr, positions_ptr, False)
    is_channel = (c < CHANNELS) & (start < end)
    scale = 1.0
    if SCALED:
        scale = tl.load(scales_ptr + c, mask=is_channel, other=0.0)
    window_at = windows_ptr + (slot * CHANNELS + c) * (WIDTH - 1)
    num_tokens = end - start
    turns = num_tokens
    if not ENDS:
        turns = tl.minimum(num_tokens, 1)
    for turn in range(turns):  # the last tokens first: the window that all need is overwritten in the last turn
        length = num_tokens - turn
        kept_at = window_at
        if ENDS:
            own = tl.load(ends_ptr + start + length - 1).to(tl.int64)
            kept_at = windows_ptr + (own * CHANNELS + c) * (WIDTH - 1)
        for w in tl.static_range(WIDTH - 1):
            place = length + (w - WIDTH + 1)
            at = (start + place) * OUTPUTS + column
            is_new = is_channel & (place >= 0)
            x = load_inputs(x_ptr, at, scale, is_new, T * OUTPUTS, CHANNELS, PARTS, GATED, SCALED, dtype)
            # A later place of the window than the one that is written: there is at least one token.
            x += tl.load(window_at + (w + length), mask=is_channel & (place < 0) & is_old, other=0.0)
            tl.debug_barrier()  # another thread may have read what is there, for an earlier place
            tl.store(kept_at + w, x, mask=is_channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConvolution:
    """The convolution of a layer, with the cache of its windows."""

    weight: Tensor  # [C, 1, W]
    bias: Tensor | None
    windows: Tensor  # [slots, C, W - 1]
    first: int = 0  # the column of its inputs in the projection
    # Of projections that are grouped by key head: numbers of all keys, of a key, of its values, and of the whole group.
    groups: tuple[int, int, int, int] = field(default=(0, 1, 1, 1))
    is_gated: bool = False
    scales: Tensor | None = None  # of the inputs

    def __call__(self, x: Projection, sequences: Sequences) -> Tensor:
        """The outputs [T, C] of the tokens, after their activation; windows move on."""
        num_tokens, (channels, _, width) = sequences.num_tokens, self.weight.shape
        y = torch.empty(num_tokens, channels, dtype=self.weight.dtype, device=x.rows.device)
        keys, key_size, values, stride = self.groups
        options = {
            "CHANNELS": channels, "WIDTH": width, "OUTPUTS": x.width, "PARTS": x.num_parts, "FIRST": self.first,
            "KEYS": keys, "KEY_SIZE": key_size, "VALUES": values, "STRIDE": stride, "GATED": self.is_gated,
            "SCALED": self.scales is not None, "BLOCK": BLOCK,
        }  # fmt: skip
        places = sequences.slots_S, sequences.positions_T, sequences.starts
        has_one, blocks = sequences.has_one_each, triton.cdiv(channels, BLOCK)
        tokens = 1 if has_one else TOKENS
        launch: Any = convolve_tokens
        launch[(blocks, triton.cdiv(num_tokens, tokens))](
            x.rows, self.weight, self.bias, self.scales, self.windows, *places, sequences.of_tokens_T, y, num_tokens,
            **options, HAS_BIAS=self.bias is not None, ONE=has_one, TOKENS=tokens,
            **overlap_options(num_tokens, MAX_ROWS), num_warps=2 if has_one else 4,
        )  # fmt: skip
        if not has_one:
            keep: Any = keep_windows
            keep[(blocks, sequences.num_sequences)](
                x.rows, self.scales, self.windows, *places, sequences.ends_T, y, num_tokens,
                **options, ENDS=sequences.ends_T is not None, num_warps=2,
            )  # fmt: skip
        return y
