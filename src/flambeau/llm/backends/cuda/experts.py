"""The products of experts, in Triton: the weights of an expert are read once for all rows that have chosen it.

A pair is a row and one of its experts. One row is multiplied by plain threads. For several rows, each program
multiplies a tile of the pairs of one expert by tensor cores; it finds them among all pairs. Many pairs are sorted
beforehand. The plain version is Experts.compute_each.

Shapes: T rows · E hidden · F intermediate · N experts · A experts of a row · P pairs, which are T·A · M tiles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.dequantize import is_fast, widen, widen_pairs
from flambeau.llm.backends.cuda.expert_tiles import MIN_ROWS, searched_pairs, sorted_tiles, tile_rows
from flambeau.llm.backends.cuda.int4 import group_sums
from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.rope import clipped


@triton.jit  # type: ignore[untyped-decorator]
def load_inputs(x_ptr, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some inputs of one row; for 4-bit weights the first and the second ones of pairs, else twice the same."""
    place = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
    if GROUP > 0:
        first, second = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
    else:
        first, second = x, x
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def load_weights(  # type: ignore[no-untyped-def]
    weight_ptr, n, is_output, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Some weights of the outputs n; those of 4 bits in pairs."""
    each: tl.constexpr = 2 if GROUP > 0 else 1
    place = start // each + tl.arange(0, BLOCK // each)
    mask = is_output[:, None] & (place < K // each)[None, :]
    at = weight_ptr + n[:, None] * (K // each) + place[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    weights, first, second, scale_ptr, minimums_ptr, n, is_output, start,
    K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Weights times inputs [EACH, BLOCK]; of 4-bit weights, the sums of groups."""
    if GROUP > 0:
        groups: tl.constexpr = BLOCK // GROUP
        group = start // GROUP + tl.arange(0, groups)
        mask = is_output[:, None] & (group < K // GROUP)[None, :]
        at = n[:, None] * (K // GROUP) + group[None, :]
        scales = tl.load(scale_ptr + at, mask=mask, other=0.0)
        minimums = tl.load(minimums_ptr + at, mask=mask, other=0.0)
        y = group_sums(weights, scales, minimums, first, second, EACH, groups, GROUP // 2)
    else:
        y = weights.to(tl.float32) * first[None, :]
    return y


@triton.jit  # type: ignore[untyped-decorator]
def gate_values(gate, value, LIMIT: tl.constexpr, ALPHA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values times their activated gates; with a LIMIT above 0 both are clamped, as in `Experts.activate`."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        value = clipped(value, LIMIT) + 1.0
        y = gate / (1.0 + tl.exp(-gate * ALPHA)) * value
    else:
        y = gate / (1.0 + tl.exp(-gate)) * value
    return y


@triton.jit  # type: ignore[untyped-decorator]
def gate_up_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, minimums_ptr, bias_ptr, chosen_ptr, weights_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    SCALES_INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some gated outputs of one of the row's experts; gate and value are N rows of weights apart."""
    width: tl.constexpr = BLOCK // GROUP if GROUP > 0 else BLOCK
    slot = tl.program_id(1)
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    wait_for_previous(OVERLAPS)
    gates = tl.load(chosen_ptr + slot).to(tl.int64) * (2 * N) + n
    gate_sums = tl.zeros([EACH, width], tl.float32)
    value_sums = tl.zeros([EACH, width], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        weights = load_weights(weight_ptr, gates, is_output, start, K, BLOCK, GROUP)
        others = load_weights(weight_ptr, gates + N, is_output, start, K, BLOCK, GROUP)
        first, second = load_inputs(x_ptr, start, K, BLOCK, GROUP)
        if SCALES_INPUTS:
            share = tl.load(weights_ptr + slot)
            first = (first * share).to(x_ptr.dtype.element_ty).to(tl.float32)
            second = (second * share).to(x_ptr.dtype.element_ty).to(tl.float32)
        gate_sums += products(
            weights, first, second, scale_ptr, minimums_ptr, gates, is_output, start, K, EACH, BLOCK, GROUP
        )
        value_sums += products(
            others, first, second, scale_ptr, minimums_ptr, gates + N, is_output, start, K, EACH, BLOCK, GROUP
        )
    gate = tl.sum(gate_sums, 1)
    value = tl.sum(value_sums, 1)
    if HAS_SCALE:
        gate *= tl.load(scale_ptr + gates, mask=is_output, other=0.0).to(tl.float32)
        value *= tl.load(scale_ptr + gates + N, mask=is_output, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gates, mask=is_output, other=0.0).to(tl.float32)
        value += tl.load(bias_ptr + gates + N, mask=is_output, other=0.0).to(tl.float32)
    y = gate_values(gate, value, LIMIT, ALPHA)
    tl.store(y_ptr + slot * N + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def down_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, minimums_ptr, bias_ptr, chosen_ptr, weights_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES_INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all of the row's experts, added up with their weights."""
    width: tl.constexpr = BLOCK // GROUP if GROUP > 0 else BLOCK
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    # The experts were chosen before the kernel that gives the inputs, and that has waited for them.
    row = tl.load(chosen_ptr).to(tl.int64) * N + n
    weights = load_weights(weight_ptr, row, is_output, 0, K, BLOCK, GROUP)
    wait_for_previous(OVERLAPS)
    total = tl.zeros([EACH], tl.float32)
    biases = tl.zeros([EACH], tl.float32)
    sums = tl.zeros([EACH, width], tl.float32)
    for slot in tl.static_range(CHOSEN):
        row = tl.load(chosen_ptr + slot).to(tl.int64) * N + n
        share = 1.0
        if not SCALES_INPUTS:
            share = tl.load(weights_ptr + slot)
        if HAS_BIAS:
            biases += tl.load(bias_ptr + row, mask=is_output, other=0.0).to(tl.float32) * share
        if HAS_SCALE:
            sums = tl.zeros([EACH, width], tl.float32)
        for start in tl.static_range(0, K, BLOCK):
            if slot + start > 0:
                weights = load_weights(weight_ptr, row, is_output, start, K, BLOCK, GROUP)
            first, second = load_inputs(x_ptr + slot * K, start, K, BLOCK, GROUP)
            first, second = first * share, second * share
            sums += products(
                weights, first, second, scale_ptr, minimums_ptr, row, is_output, start, K, EACH, BLOCK, GROUP
            )
        if HAS_SCALE:
            scale = tl.load(scale_ptr + row, mask=is_output, other=0.0).to(tl.float32)
            total += tl.sum(sums, 1) * scale
    if not HAS_SCALE:
        total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += biases
    tl.store(y_ptr + n, total.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def load_slots(weight_ptr, row, is_row, start, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some weights [A, EACH, BLOCK] of the rows [A, EACH] of several experts."""
    place = start + tl.arange(0, BLOCK)
    at = weight_ptr + row[:, :, None] * K + place[None, None, :]
    mask = is_row[:, :, None] & (place < K)[None, None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def down_early(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, bias_ptr, chosen_ptr, weights_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_PADDED: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALES_INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """As `down_one_row`, for all experts at a time. The first EARLY blocks of weights are read before the inputs."""
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    slot = tl.arange(0, CHOSEN_PADDED)
    is_slot = slot < CHOSEN
    # The experts were chosen before the kernel that gives the inputs, and that has waited for them.
    row = tl.load(chosen_ptr + slot, mask=is_slot, other=0).to(tl.int64)[:, None] * N + n[None, :]
    is_row = is_slot[:, None] & (n < N)[None, :]
    first = load_slots(weight_ptr, row, is_row, 0, K, BLOCK)
    second, third = first, first
    if EARLY > 1:
        second = load_slots(weight_ptr, row, is_row, BLOCK, K, BLOCK)
    if EARLY > 2:
        third = load_slots(weight_ptr, row, is_row, 2 * BLOCK, K, BLOCK)
    factor = tl.full([CHOSEN_PADDED], 1.0, tl.float32)[:, None]
    if not SCALES_INPUTS:
        factor = tl.load(weights_ptr + slot, mask=is_slot, other=0.0)[:, None]
    if HAS_BIAS:
        biases = tl.sum(tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32) * factor, 0)
    if HAS_SCALE:
        factor = factor * tl.load(scale_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([EACH, BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        weights = first
        if start == BLOCK and EARLY > 1:
            weights = second
        elif start == 2 * BLOCK and EARLY > 2:
            weights = third
        elif start > 0:
            weights = load_slots(weight_ptr, row, is_row, start, K, BLOCK)
        place = start + tl.arange(0, BLOCK)
        x_mask = is_slot[:, None] & (place < K)[None, :]
        x = tl.load(x_ptr + slot[:, None] * K + place[None, :], mask=x_mask, other=0.0).to(tl.float32)
        sums += tl.sum(weights.to(tl.float32) * x[:, None, :] * factor[:, :, None], 0)
    y = tl.sum(sums, 1)
    if HAS_BIAS:
        y += biases
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit  # type: ignore[untyped-decorator]
def pairs_of_expert(chosen_ptr, expert, first, P, ROWS: tl.constexpr, SEARCHED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs of an expert [ROWS] from its number `first` on, and how many it has in all."""
    pair = tl.arange(0, SEARCHED)
    is_own = tl.load(chosen_ptr + pair, mask=pair < P, other=-1) == expert
    number = tl.cumsum(is_own.to(tl.int32), 0) - 1
    wanted = first + tl.arange(0, ROWS)
    is_found = is_own[None, :] & (number[None, :] == wanted[:, None])
    return tl.sum(tl.where(is_found, pair[None, :], 0), 1), tl.sum(is_own.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def load_pairs_of_weights(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, minimums_ptr, n, is_column, start, dtype: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The first and the second ones of pairs of 4-bit weights [COLUMNS, BLOCK / 2], widened."""
    groups: tl.constexpr = BLOCK // GROUP
    half_group: tl.constexpr = GROUP // 2
    g = start // GROUP + tl.arange(0, groups)
    is_group = is_column[:, None] & (g < K // GROUP)[None, :]
    place = g[:, None] * half_group + tl.arange(0, half_group)[None, :]
    pairs = tl.load(
        weight_ptr + n[:, None, None] * (K // 2) + place[None, :, :],
        mask=is_group[:, :, None],
        other=0,
        eviction_policy="evict_first",
    )
    at = n[:, None] * (K // GROUP) + g[None, :]
    scales = tl.load(scale_ptr + at, mask=is_group, other=0.0)[:, :, None]
    minimums = tl.load(minimums_ptr + at, mask=is_group, other=0.0)[:, :, None]
    first, second = widen_pairs(pairs, scales, minimums, dtype, FAST)
    return tl.reshape(first, [COLUMNS, BLOCK // 2]), tl.reshape(second, [COLUMNS, BLOCK // 2])


@triton.jit  # type: ignore[untyped-decorator]
def add_products(  # type: ignore[no-untyped-def]
    sums, x, weight_ptr, scale_ptr, minimums_ptr, n, is_column, start,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The sums [ROWS, COLUMNS] with the products of some inputs."""
    if GROUP > 0:
        first, second = load_pairs_of_weights(
            weight_ptr, scale_ptr, minimums_ptr, n, is_column, start, x.dtype, K, COLUMNS, BLOCK, GROUP, FAST
        )
        first_x, second_x = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
        sums = tl.dot(first_x, tl.trans(first), sums, input_precision="ieee")
        sums = tl.dot(second_x, tl.trans(second), sums, input_precision="ieee")
    else:
        place = start + tl.arange(0, BLOCK)
        mask = is_column[:, None] & (place < K)[None, :]
        weights = tl.load(weight_ptr + n[:, None] * K + place[None, :], mask=mask, other=0.0)
        sums = tl.dot(x, tl.trans(widen(weights, x.dtype, FAST)), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["T", "P", "num_tiles"])  # type: ignore[untyped-decorator]
def multiply_pairs(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, minimums_ptr, bias_ptr, chosen_ptr, weights_ptr, order_ptr, tiles_ptr, y_ptr,
    T, P, num_tiles,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SEARCHED: tl.constexpr, GATES: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SCALES_INPUTS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs of one expert.

    With GATES, inputs are rows and outputs are gated, for each pair; else inputs are those, and outputs [A, T, N] are
    weighted. SEARCHED is 0 if the pairs are sorted; else each expert has `num_tiles`, of which some have no pairs.
    """
    tile = tl.program_id(0)
    if SEARCHED > 0:
        expert = tile // num_tiles
        first = tile % num_tiles * ROWS
        pair, stop = pairs_of_expert(chosen_ptr, expert, first, P, ROWS, SEARCHED)
        is_row = first + tl.arange(0, ROWS) < stop
    else:
        expert = tl.load(tiles_ptr + tile * 3)
        first = tl.load(tiles_ptr + tile * 3 + 1)
        stop = tl.load(tiles_ptr + tile * 3 + 2)
        is_row = first + tl.arange(0, ROWS) < stop
        pair = tl.load(order_ptr + first + tl.arange(0, ROWS), mask=is_row, other=0).to(tl.int32)
    if first < stop:
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = n < N
        k = tl.arange(0, BLOCK)
        outputs: tl.constexpr = 2 * N if GATES else N
        column = expert.to(tl.int64) * outputs + n
        x_row = pair // CHOSEN if GATES else pair
        x_rows = x_ptr + x_row[:, None].to(tl.int64) * K
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        other_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, K, BLOCK):
            x = tl.load(x_rows + start + k[None, :], mask=is_row[:, None] & (start + k < K)[None, :], other=0.0)
            if SCALES_INPUTS and GATES:
                share = tl.load(weights_ptr + pair, mask=is_row, other=0.0)
                x = (x.to(tl.float32) * share[:, None]).to(x.dtype)
            sums = add_products(
                sums, x, weight_ptr, scale_ptr, minimums_ptr, column, is_column, start,
                K, ROWS, COLUMNS, BLOCK, GROUP, FAST,
            )  # fmt: skip
            if GATES:
                other_sums = add_products(
                    other_sums, x, weight_ptr, scale_ptr, minimums_ptr, column + N, is_column, start,
                    K, ROWS, COLUMNS, BLOCK, GROUP, FAST,
                )  # fmt: skip
        if HAS_SCALE:
            sums *= tl.load(scale_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATES:
                other_sums *= tl.load(scale_ptr + column + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATES:
                other_sums += tl.load(bias_ptr + column + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATES:
            sums = gate_values(sums, other_sums, LIMIT, ALPHA)
            y_row = pair
        else:
            if not SCALES_INPUTS:
                sums *= tl.load(weights_ptr + pair, mask=is_row, other=0.0)[:, None]
            y_row = pair % CHOSEN * T + pair // CHOSEN
        y_at = y_ptr + y_row[:, None].to(tl.int64) * N + n[None, :]
        tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of all experts [N, outputs, inputs]; those of 4 bits are pairs of neighbors."""

    weight: Tensor
    scale: Tensor | None = None  # of each output [N, outputs], or of each group [N, outputs, groups]
    minimums: Tensor | None = None  # of each group of 4-bit weights
    group_size: int = 0  # of 4-bit weights
    bias: Tensor | None = None  # of each output [N, outputs]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.weight, self.scale, self.minimums, self.bias

    @property
    def options(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        has_scale = self.scale is not None and not self.group_size
        return {"GROUP": self.group_size, "HAS_SCALE": has_scale, "HAS_BIAS": self.bias is not None}

    @property
    def itemsize(self) -> float:
        """Bytes of a weight."""
        return 0.5 if self.group_size else self.weight.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelExperts:
    """The experts of a layer with their tensors as the kernels read them."""

    gate_up: ExpertWeights  # [N, 2·F, E]
    down: ExpertWeights  # [N, E, F]
    limit: float = 0.0  # of gates and values; 0: none
    alpha: float = 1.0  # with a limit
    scales_inputs: bool = False  # inputs are weighted instead of outputs

    @property
    def gate_options(self) -> dict[str, float]:
        return {"LIMIT": self.limit, "ALPHA": self.alpha}

    def __call__(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor, out_1E: Tensor | None = None) -> Tensor:
        """The weighted sums [T, E] of the experts' outputs, or parts [A, T, E] of them; indices are of 32 bits.

        Those of one row are in `out_1E`, if there is one.
        """
        if len(x_TE) == 1:
            return one_row(x_TE, self, chosen_TA, weights_TA, out_1E)
        return several_rows(x_TE, self, chosen_TA, weights_TA)


def one_row(x: Tensor, experts: KernelExperts, chosen: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """[1, E] to [1, E]."""
    gate_up, down, num_chosen = experts.gate_up, experts.down, chosen.shape[1]
    size, width = x.shape[1], gate_up.weight.shape[1] // 2
    gated = torch.empty(num_chosen, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x) if out is None else out
    each, block, warps = gate_up_shape(size, gate_up.itemsize)
    launch: Any = gate_up_one_row
    launch[(triton.cdiv(width, each), num_chosen)](
        x, *gate_up.tensors, chosen, weights, gated,
        N=width, K=size, EACH=each, BLOCK=max(block, gate_up.group_size), **gate_up.options, **experts.gate_options,
        SCALES_INPUTS=experts.scales_inputs, **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    shape = None if down.group_size else early_shape(width, num_chosen, down.itemsize)
    if shape is None:
        each, block, warps = down_shape(width, down.itemsize)
        launch = down_one_row
        launch[(triton.cdiv(size, each),)](
            gated, *down.tensors, chosen, weights, y,
            N=size, K=width, CHOSEN=num_chosen, EACH=each, BLOCK=max(block, down.group_size), **down.options,
            SCALES_INPUTS=experts.scales_inputs, **overlap_options(1), num_warps=warps,
        )  # fmt: skip
        return y
    each, block, early, warps = shape
    launch = down_early
    launch[(triton.cdiv(size, each),)](
        gated, down.weight, down.scale, down.bias, chosen, weights, y,
        N=size, K=width, CHOSEN=num_chosen, CHOSEN_PADDED=triton.next_power_of_2(num_chosen), EACH=each, BLOCK=block,
        EARLY=early, HAS_SCALE=down.scale is not None, HAS_BIAS=down.bias is not None,
        SCALES_INPUTS=experts.scales_inputs, **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    return y


def several_rows(x: Tensor, experts: KernelExperts, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, E] to [A, T, E]."""
    num_experts, size, width = len(experts.down.weight), x.shape[1], experts.gate_up.weight.shape[1] // 2
    (num_rows, num_chosen), num_pairs = chosen.shape, chosen.numel()
    rows = tile_rows(num_pairs, num_experts)
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    searched = searched_pairs(num_pairs)
    num_tiles = -(-num_rows // rows)  # of an expert: no row chooses it twice
    num_programs = num_experts * num_tiles
    if not searched:
        tables = sorted_tiles(chosen, num_experts, rows)
        num_programs = len(tables[1])
    is_few = num_rows <= MIN_ROWS * 4
    gated = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    y = torch.empty(num_chosen, num_rows, size, dtype=torch.float32 if is_few else x.dtype, device=x.device)
    products = (x, experts.gate_up, gated, width, size), (gated, experts.down, y, size, width)
    for given, matrix, outputs, num_outputs, num_inputs in products:
        gates = outputs is gated
        columns, block, warps, stages = tile_shape(x.dtype, matrix.itemsize, rows, gates=gates)
        is_rounded = matrix.minimums is None or matrix.minimums.dtype == torch.bfloat16
        launch: Any = multiply_pairs
        launch[(num_programs, triton.cdiv(num_outputs, columns))](
            given, *matrix.tensors, chosen, weights, *tables, outputs, num_rows, num_pairs, num_tiles,
            N=num_outputs, K=num_inputs, CHOSEN=num_chosen, ROWS=rows, COLUMNS=columns,
            BLOCK=max(block, matrix.group_size), SEARCHED=searched, GATES=gates, FAST=is_fast(x.dtype) and is_rounded,
            **matrix.options, **experts.gate_options, SCALES_INPUTS=experts.scales_inputs,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def gate_up_shape(size: int, itemsize: float) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and warps: the best of those measured.

    `itemsize` are the bytes of a weight.
    """
    block = triton.next_power_of_2(size)
    if itemsize == 1:
        return 4, min(1024, block), 4
    return 2, min(2048, block), min(4, max(1, block // 512))


def down_shape(width: int, itemsize: float) -> tuple[int, int, int]:
    """The same for the outputs of all experts of a row. Blocks divide the inputs, unless these are odd."""
    block = min(1024, max(256, width & -width))
    if itemsize > 1:
        return 2 if block == 256 else 1, block, 1
    return 4, min(1024, triton.next_power_of_2(width)), 4


def early_shape(width: int, num_chosen: int, itemsize: float) -> tuple[int, int, int, int] | None:
    """Outputs of a program, inputs that it reads at a time, how many of these blocks early, and warps.

    None: `down_one_row` is as fast, or was not measured beside it.
    """
    if not 512 < width <= 768 or num_chosen > 8:
        return None
    return 1, 256, 2 if itemsize > 1 else 3, 1


def tile_shape(dtype: torch.dtype, itemsize: float, rows: int, *, gates: bool) -> tuple[int, int, int, int]:
    """Outputs of a program, inputs that it reads at a time, warps and pipeline stages."""
    if dtype == torch.float32:
        return (32, 32, 4, 2) if rows > 32 else (32 if gates else 64, 64, 4, 3)
    if rows > 64:
        return (64, 64, 8, 4) if gates else (256, 64, 8, 3)
    return (64, 128, 4, 3) if gates else (64, 64, 4, 5) if itemsize > 1 else (64, 128, 4, 4)
