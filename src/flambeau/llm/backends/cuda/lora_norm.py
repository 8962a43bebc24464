"""Norms that also compute what adapters do before and after them, without launches of their own.

Every row has several programs. Each adds up the whole row, with what its adapter adds to the layer before, normalizes
it, and multiplies the result with some ranks of the next layer's A. A program reads all of the first adapter's
matrices, so the norm does this only where they are small.

The first ranks of all matrices are read before the kernel waits for the one before it.

Inner sums are parts [P, T, X] of a row's own slot, or they have the ranks of all slots beside each other, as the
products of `lora_products.py` give and take them.

Shapes: T rows · E hidden · N outputs · I inputs · S parts of a sum · P parts of the inner sums · L slots · X ranks of
all segments of a layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.lora_kernel import expand, load_ranks, shrink, sum_of_parts
from flambeau.llm.backends.cuda.lora_slots import LayerSlots
from flambeau.llm.backends.cuda.norm import NormParameters, normalized, with_sums

RANKS_EACH = 4  # of the next adapter, that are multiplied at a time
# None of these was measured. All programs together read from the L2 cache about as much as it gives in the time of the
# launches that they spare.
MAX_SIZE = 4096  # of rows: with longer ones, registers do not hold enough ranks
NUM_PROGRAMS = 128
PROGRAM_BYTES = 128 << 10  # that a program reads for each launch that it spares
MIN_PADDED_ROWS = 8  # fewer have as many programs each: kernels are compiled for this number
RANKS_BEFORE = 16  # of the adapter before, that are multiplied at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexpanded:
    """Outputs of a linear layer to which its adapters were not added: the next kernel may do that."""

    y: Tensor  # [T, N], or parts [S, T, N] of the sums
    inner: Tensor  # parts [P, T, X] of the inputs times A, or [P, T, L·X] times that of all slots
    slots: LayerSlots
    places_T: Tensor

    @property
    def has_all_slots(self) -> bool:
        return self.inner.shape[2] > self.slots.num_ranks

    def own_inner(self) -> Tensor:
        """Parts [P, T, X] of each row's own slot; those of rows without an adapter are undefined."""
        if not self.has_all_slots:
            return self.inner
        num_parts, num_rows, _ = self.inner.shape
        all_PTLX = self.inner.view(num_parts, num_rows, -1, self.slots.num_ranks)
        own_T = (self.places_T - 1).clamp_min(0)
        return all_PTLX[:, torch.arange(num_rows, device=own_T.device), own_T].contiguous()

    def expanded(self) -> Tensor:
        """[T, N], or parts [S, T, N] of the sums, with adapters."""
        expand(self.y, self.own_inner(), self.places_T, self.slots)
        return self.y


class Normalized(NamedTuple):
    """Rows before a part of a layer."""

    x_TE: Tensor  # the residual stream
    y_TE: Tensor
    inner: Tensor | None  # parts [P, T, X] of y times A, or [T, X·L]: zero but for each row's own slot


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def normalize_with_adapters(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, gain_ptr, bias_ptr, after_gain_ptr, after_bias_ptr, places_ptr,
    before_inner_ptr, before_b_ptr, kept_ptr, y_ptr, a_ptr, inner_ptr, epsilon, scale, T,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, CENTERED: tl.constexpr, AFTER: tl.constexpr,
    NORMALIZES: tl.constexpr, KEEPS: tl.constexpr, BEFORE_RANK: tl.constexpr, BEFORE_SLOTS: tl.constexpr,
    BEFORE_PARTS: tl.constexpr, BEFORE_PARTS_PADDED: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
    SLOTS: tl.constexpr, SEGMENT: tl.constexpr, SHARE: tl.constexpr, EACH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """As `norm.add_and_normalize`, not in place, with the adapters of the layer before (BEFORE_RANK) and after (RANKS).

    BEFORE_SLOTS and SLOTS: the inner sums have the ranks of so many slots; 1: only those of the row's own. SEGMENT: of
    the layer after, the ranks of one slot and one segment.
    """
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    e = tl.arange(0, PADDED)
    is_element = e < SIZE
    slot = tl.load(places_ptr + row) - 1
    has_adapter = slot >= 0
    gain, bias = 1.0, 0.0
    if NORMALIZES:
        gain = tl.load(gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
        if CENTERED:
            bias = tl.load(bias_ptr + e, mask=is_element, other=0.0).to(tl.float32)
    if BEFORE_RANK > 0:
        before_b = load_ranks(before_b_ptr, slot, 0, e, is_element, has_adapter, BEFORE_RANK, SIZE, BLOCK)
    if RANKS > 0:
        a = load_ranks(a_ptr, slot, program * SHARE, e, is_element, has_adapter, RANKS, SIZE, EACH)
    wait_for_previous(OVERLAPS)
    more = 0.0
    if BEFORE_RANK > 0:
        more = tl.zeros([PADDED], tl.float32)
        own = 0
        if BEFORE_SLOTS > 1:
            own = slot * BEFORE_RANK
        for first in tl.static_range(0, BEFORE_RANK, BLOCK):
            if first > 0:
                before_b = load_ranks(
                    before_b_ptr, slot, first, e, is_element, has_adapter, BEFORE_RANK, SIZE, BLOCK
                )  # fmt: skip
            inner = sum_of_parts(
                before_inner_ptr, row, own + first, has_adapter, T, BEFORE_SLOTS * BEFORE_RANK, BEFORE_PARTS,
                BEFORE_PARTS_PADDED, BLOCK,
            )  # fmt: skip
            more += tl.sum(before_b.to(tl.float32) * inner[:, None], 0)
    x = tl.load(x_ptr + row * SIZE + e, mask=is_element, other=0.0).to(tl.float32)
    if PARTS > 0:
        x = with_sums(
            x, more, sums_ptr, after_gain_ptr, after_bias_ptr, row, e, is_element, epsilon, scale, T,
            x_ptr.dtype.element_ty, SIZE, PADDED, PARTS, CENTERED, AFTER, BEFORE_RANK > 0,
        )  # fmt: skip
        if KEEPS and program == 0:
            tl.store(kept_ptr + row * SIZE + e, x.to(kept_ptr.dtype.element_ty), mask=is_element)
    if NORMALIZES:
        x = normalized(x, gain, bias, is_element, epsilon, SIZE, CENTERED)
        if program == 0:
            tl.store(y_ptr + row * SIZE + e, x.to(y_ptr.dtype.element_ty), mask=is_element)
    if RANKS > 0:
        x = x.to(y_ptr.dtype.element_ty).to(tl.float32)
        for start in tl.static_range(0, SHARE, EACH):
            if start > 0:
                a = load_ranks(a_ptr, slot, program * SHARE + start, e, is_element, has_adapter, RANKS, SIZE, EACH)
            rank = program * SHARE + start + tl.arange(0, EACH)
            sums = tl.sum(a.to(tl.float32) * x[None, :], 1)
            if SLOTS > 1:
                other = tl.arange(0, SLOTS)
                # [segments, L, ranks of a segment]
                at = rank // SEGMENT * (SLOTS * SEGMENT) + rank % SEGMENT
                values = tl.where((other == slot)[:, None], sums[None, :], 0.0)
                to = inner_ptr + row * (SLOTS * RANKS) + other[:, None] * SEGMENT + at[None, :]
                tl.store(to, values.to(inner_ptr.dtype.element_ty), mask=(rank < RANKS)[None, :])
            else:
                tl.store(inner_ptr + row * RANKS + rank, sums, mask=(rank < RANKS) & has_adapter)


def can_expand(slots: LayerSlots, num_rows: int) -> bool:
    """Whether norms should add the adapters of a layer."""
    size_bytes = slots.rank * slots.shape.outputs * slots.b_LRO.itemsize
    return num_rows <= MAX_ROWS and slots.shape.outputs <= MAX_SIZE and size_bytes <= PROGRAM_BYTES


def can_shrink(slots: LayerSlots, num_rows: int) -> bool:
    """Whether norms should multiply their results with the A of a layer."""
    size_bytes = ranks_of_program(slots, num_rows) * slots.shape.inputs * slots.a_LXI.itemsize
    return num_rows <= MAX_ROWS and slots.shape.inputs <= MAX_SIZE and size_bytes <= PROGRAM_BYTES


def ranks_of_program(slots: LayerSlots, num_rows: int) -> int:
    """How many ranks of the layer after a program multiplies."""
    num_programs: int = max(1, NUM_PROGRAMS // max(MIN_PADDED_ROWS, triton.next_power_of_2(num_rows)))
    return -(-slots.num_ranks // (num_programs * RANKS_EACH)) * RANKS_EACH


def normalize(
    norm: NormParameters,
    x_TE: Tensor,
    sums: Unexpanded | Tensor | None,
    after: LayerSlots | None,
    places_T: Tensor,
    *,
    fuses: bool = True,
    spreads: bool = False,
) -> Normalized:
    """As a norm, with the adapters of the `sums` [T, E] or [S, T, E], and those times the A of a layer after it.

    The residual stream is changed in place if no layer follows. Without `fuses`, or where the kernel would read too
    much, adapters have launches of their own. With `spreads`, which needs `can_shrink`, the products with A have places
    for all slots.
    """
    num_rows = len(x_TE)
    before = sums if isinstance(sums, Unexpanded) else None
    if before is not None and not (fuses and can_expand(before.slots, num_rows)):
        sums, before = before.expanded(), None
    next_slots = after if after is not None and fuses and can_shrink(after, num_rows) else None
    if before is None and next_slots is None:
        assert not isinstance(sums, Unexpanded)
        y_TE = norm(x_TE, sums)
        return Normalized(x_TE, y_TE, None if after is None else shrink(y_TE, places_T, after))
    found = launch_norm(norm, x_TE, sums, next_slots, places_T, is_last=after is None, spreads=spreads)
    if after is None or next_slots is not None:
        return found
    return found._replace(inner=shrink(found.y_TE, places_T, after))


def launch_norm(
    norm: NormParameters,
    x_TE: Tensor,
    sums: Unexpanded | Tensor | None,
    after: LayerSlots | None,
    places_T: Tensor,
    *,
    is_last: bool,
    spreads: bool,
) -> Normalized:
    """The same by one kernel; in place if it is the last one."""
    before = sums if isinstance(sums, Unexpanded) else None
    parts = before.y if before is not None else sums
    assert not isinstance(parts, Unexpanded)
    num_rows, size = x_TE.shape
    # Programs of a row read the stream at different times.
    kept = x_TE if is_last or (parts is None and not norm.replaces) else torch.empty_like(x_TE)
    y = kept if norm.gain is None or norm.replaces else torch.empty_like(x_TE, dtype=norm.dtype)
    after_gains = (None, None) if norm.after is None or parts is None else norm.after
    ranks, share = (0, 0) if after is None else (after.num_ranks, ranks_of_program(after, num_rows))
    num_slots = 1 if after is None or not spreads else after.num_slots
    inner = None
    if after is not None and spreads:
        inner = torch.empty(num_rows, num_slots * ranks, device=x_TE.device, dtype=y.dtype)
    elif after is not None:
        inner = torch.empty(1, num_rows, ranks, device=x_TE.device)
    before_inner = None if before is None else before.inner
    before_parts = 1 if before_inner is None else len(before_inner)
    launch: Any = normalize_with_adapters
    launch[(num_rows, max(1, triton.cdiv(ranks, share or 1)))](
        x_TE, parts, norm.gain, norm.bias, *after_gains, places_T,
        before_inner, None if before is None else before.slots.b_LRO,
        kept, y, None if after is None else after.a_LXI, inner, norm.epsilon, norm.residual_scale, num_rows,
        SIZE=size, PADDED=triton.next_power_of_2(size), PARTS=0 if parts is None else parts.numel() // x_TE.numel(),
        CENTERED=norm.bias is not None or after_gains[1] is not None, AFTER=after_gains[0] is not None,
        NORMALIZES=norm.gain is not None, KEEPS=not norm.replaces,
        BEFORE_RANK=0 if before is None else before.slots.rank,
        BEFORE_SLOTS=before.slots.num_slots if before is not None and before.has_all_slots else 1,
        BEFORE_PARTS=before_parts, BEFORE_PARTS_PADDED=triton.next_power_of_2(before_parts), BLOCK=RANKS_BEFORE,
        RANKS=ranks, SLOTS=num_slots, SEGMENT=after.rank if after is not None else 1, SHARE=share, EACH=RANKS_EACH,
        **overlap_options(num_rows, MAX_ROWS), num_warps=8 if size <= MAX_SIZE // 2 else 16,
    )  # fmt: skip
    return Normalized(kept, y, inner)
