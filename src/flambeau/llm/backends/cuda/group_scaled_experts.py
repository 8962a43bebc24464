"""The products of experts whose weights have a scale for each group of inputs: 8-bit numbers, codes and levels.

As experts.py, with weights read as in group_scaled.py.

Shapes: T rows · E hidden · F intermediate · N experts · A experts of a row · P pairs, which are T·A · M tiles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.code_instructions import Codes, formats
from flambeau.llm.backends.cuda.dequantize import is_fast
from flambeau.llm.backends.cuda.expert_tiles import MIN_ROWS, searched_pairs, sorted_tiles, tile_rows
from flambeau.llm.backends.cuda.experts import gate_values, pairs_of_expert
from flambeau.llm.backends.cuda.group_scaled import MIN_SUM_GROUP, RowsShape
from flambeau.llm.backends.cuda.group_weights import (
    add_groups,
    load_inputs,
    load_row_inputs,
    load_row_scales,
    load_row_weights,
    sums_of_groups,
)
from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous
from flambeau.llm.models.moe import Experts
from flambeau.llm.quantize.coded import CodeLayout, table_tensor
from flambeau.llm.quantize.cuda_groups import CudaGroupedStack, pair_bits
from flambeau.llm.quantize.groups import FACTOR_SIZE, GroupLayout
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack


@triton.jit  # type: ignore[untyped-decorator]
def gate_up_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, bias_ptr, chosen_ptr, weights_ptr,
    y_ptr,
    N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr, HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SCALES_INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some gated outputs of one of the row's experts; gate and value are N rows of weights apart."""
    groups: tl.constexpr = BLOCK // GROUP
    slot = tl.program_id(1)
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    wait_for_previous(OVERLAPS)
    gates = tl.load(chosen_ptr + slot).to(tl.int64) * (2 * N) + n
    gate_sums = tl.zeros([EACH, groups], tl.float32)
    value_sums = tl.zeros([EACH, groups], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        weights = load_row_weights(weight_ptr, more_ptr, gates, is_output, start, K, BLOCK, GROUP, PAIRS, BITS)
        others = load_row_weights(weight_ptr, more_ptr, gates + N, is_output, start, K, BLOCK, GROUP, PAIRS, BITS)
        scales, minimums = load_row_scales(
            scale_ptr, minimum_ptr, factor_ptr, gates, is_output, start, K, BLOCK, GROUP, SPAN, HAS_MINIMUMS
        )
        other_scales, other_minimums = load_row_scales(
            scale_ptr, minimum_ptr, factor_ptr, gates + N, is_output, start, K, BLOCK, GROUP, SPAN, HAS_MINIMUMS
        )
        first, second = load_row_inputs(x_ptr, start, K, BLOCK, GROUP, PAIRS)
        if SCALES_INPUTS:
            share = tl.load(weights_ptr + slot)
            first = (first * share).to(x_ptr.dtype.element_ty).to(tl.float32)
            second = (second * share).to(x_ptr.dtype.element_ty).to(tl.float32)
        gate_sums += sums_of_groups(
            weights, scales, minimums, first, second, table_ptr,
            EACH, BLOCK, GROUP, PAIRS, BITS, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES,
        )  # fmt: skip
        value_sums += sums_of_groups(
            others, other_scales, other_minimums, first, second, table_ptr,
            EACH, BLOCK, GROUP, PAIRS, BITS, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES,
        )  # fmt: skip
    gate = tl.sum(gate_sums, 1)
    value = tl.sum(value_sums, 1)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gates, mask=is_output, other=0.0).to(tl.float32)
        value += tl.load(bias_ptr + gates + N, mask=is_output, other=0.0).to(tl.float32)
    y = gate_values(gate, value, LIMIT, ALPHA)
    tl.store(y_ptr + slot * N + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def down_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, bias_ptr, chosen_ptr, weights_ptr,
    y_ptr,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr, SCALES_INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all of the row's experts, added up with their weights."""
    groups: tl.constexpr = BLOCK // GROUP
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    # The experts were chosen before the kernel that gives the inputs, and that has waited for them.
    row = tl.load(chosen_ptr).to(tl.int64) * N + n
    weights = load_row_weights(weight_ptr, more_ptr, row, is_output, 0, K, BLOCK, GROUP, PAIRS, BITS)
    wait_for_previous(OVERLAPS)
    biases = tl.zeros([EACH], tl.float32)
    sums = tl.zeros([EACH, groups], tl.float32)
    for slot in tl.static_range(CHOSEN):
        row = tl.load(chosen_ptr + slot).to(tl.int64) * N + n
        share = 1.0
        if not SCALES_INPUTS:
            share = tl.load(weights_ptr + slot)
        if HAS_BIAS:
            biases += tl.load(bias_ptr + row, mask=is_output, other=0.0).to(tl.float32) * share
        for start in tl.static_range(0, K, BLOCK):
            if slot + start > 0:
                weights = load_row_weights(weight_ptr, more_ptr, row, is_output, start, K, BLOCK, GROUP, PAIRS, BITS)
            scales, minimums = load_row_scales(
                scale_ptr, minimum_ptr, factor_ptr, row, is_output, start, K, BLOCK, GROUP, SPAN, HAS_MINIMUMS
            )
            first, second = load_row_inputs(x_ptr + slot * K, start, K, BLOCK, GROUP, PAIRS)
            sums += share * sums_of_groups(
                weights, scales, minimums, first, second, table_ptr,
                EACH, BLOCK, GROUP, PAIRS, BITS, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES,
            )  # fmt: skip
    total = tl.sum(sums, 1) + biases
    tl.store(y_ptr + n, total.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["T", "P", "num_tiles"])  # type: ignore[untyped-decorator]
def multiply_pairs(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, bias_ptr, chosen_ptr, weights_ptr,
    order_ptr, tiles_ptr, y_ptr,
    T, P, num_tiles,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr, FAST: tl.constexpr,
    FIRST: tl.constexpr, SEARCHED: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, SCALES_INPUTS: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs of one expert; see experts.multiply_pairs."""
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
        outputs: tl.constexpr = 2 * N if GATES else N
        column = expert.to(tl.int64) * outputs + n
        x_row = pair // CHOSEN if GATES else pair
        x_rows = x_ptr + x_row.to(tl.int64) * K
        sums = tl.zeros([COLUMNS, ROWS] if FIRST else [ROWS, COLUMNS], tl.float32)
        other_sums = tl.zeros([COLUMNS, ROWS] if FIRST else [ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, K, BLOCK):
            first_x, second_x = load_inputs(x_rows, is_row, start, K, BLOCK, GROUP, PAIRS)
            if SCALES_INPUTS and GATES:
                share = tl.load(weights_ptr + pair, mask=is_row, other=0.0)[:, None]
                first_x = (first_x.to(tl.float32) * share).to(first_x.dtype)
                second_x = (second_x.to(tl.float32) * share).to(second_x.dtype)
            sums = add_groups(
                sums, first_x, second_x, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr,
                column, is_column, start,
                K, COLUMNS, BLOCK, GROUP, PAIRS, BITS, SPAN, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES, FAST, FIRST,
            )  # fmt: skip
            if GATES:
                other_sums = add_groups(
                    other_sums, first_x, second_x, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr,
                    column + N, is_column, start,
                    K, COLUMNS, BLOCK, GROUP, PAIRS, BITS, SPAN, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES, FAST, FIRST,
                )  # fmt: skip
        if FIRST:
            sums = tl.trans(sums)
            other_sums = tl.trans(other_sums)
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
class GroupScaledWeights:
    """The weights of all experts [N, outputs, inputs]; codes and levels are pairs half a group apart."""

    weight: Tensor
    scales: Tensor  # [N, outputs, groups]
    codes: Codes | None = None
    bits: int = 0  # of levels in pairs; 0: there are none
    more: Tensor | None = None  # the bits of levels above the lower 4
    minimums: Tensor | None = None  # [N, outputs, groups]
    factors: Tensor | None = None  # of scales and minimums [N, outputs, factors]
    group_size: int
    bias: Tensor | None = None  # of each output [N, outputs]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the kernels' arguments."""
        table = None if self.codes is None else self.codes.table
        return self.weight, self.more, self.scales, self.minimums, self.factors, table, self.bias

    @property
    def pairs(self) -> bool:
        return self.codes is not None or self.bits > 0

    def options(self, dtype: torch.dtype, *, is_scaled: bool) -> dict[str, Any]:
        """What the kernels are compiled for, with inputs of a type."""
        found = formats(self.codes, self.scales, dtype, is_scaled=is_scaled)
        return {
            "GROUP": self.group_size, "PAIRS": self.pairs, "BITS": self.bits,
            "SPAN": 0 if self.factors is None else FACTOR_SIZE, "HAS_MINIMUMS": self.minimums is not None,
            "HAS_BIAS": self.bias is not None, **found,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScaledExperts:
    """The experts of a layer with their tensors as the kernels read them; used as experts.KernelExperts."""

    gate_up: GroupScaledWeights  # [N, 2·F, E]
    down: GroupScaledWeights  # [N, E, F]
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


def one_row(
    x: Tensor, experts: GroupScaledExperts, chosen: Tensor, weights: Tensor, out: Tensor | None = None
) -> Tensor:
    """[1, E] to [1, E]."""
    gate_up, down, num_chosen = experts.gate_up, experts.down, chosen.shape[1]
    size, width = x.shape[1], gate_up.weight.shape[1] // 2
    gated = torch.empty(num_chosen, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x) if out is None else out
    each, block, warps = one_row_shape(size, gate_up.group_size, pairs=gate_up.pairs, gates=True)
    launch: Any = gate_up_one_row
    launch[(triton.cdiv(width, each), num_chosen)](
        x, *gate_up.tensors, chosen, weights, gated,
        N=width, K=size, EACH=each, BLOCK=block, **gate_up.options(x.dtype, is_scaled=False), **experts.gate_options,
        SCALES_INPUTS=experts.scales_inputs, **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    each, block, warps = one_row_shape(width, down.group_size, pairs=down.pairs, gates=False)
    launch = down_one_row
    launch[(triton.cdiv(size, each),)](
        gated, *down.tensors, chosen, weights, y,
        N=size, K=width, CHOSEN=num_chosen, EACH=each, BLOCK=block, **down.options(x.dtype, is_scaled=False),
        SCALES_INPUTS=experts.scales_inputs, **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    return y


def several_rows(x: Tensor, experts: GroupScaledExperts, chosen: Tensor, weights: Tensor) -> Tensor:
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
        shape = tile_shape(x.dtype, rows, matrix, gates=gates)
        launch: Any = multiply_pairs
        launch[(num_programs, triton.cdiv(num_outputs, shape.columns))](
            given, *matrix.tensors, chosen, weights, *tables, outputs, num_rows, num_pairs, num_tiles,
            N=num_outputs, K=num_inputs, CHOSEN=num_chosen, ROWS=rows, SEARCHED=searched, GATES=gates,
            FAST=is_fast(x.dtype), **matrix.options(x.dtype, is_scaled=True), **shape.options, **experts.gate_options,
            SCALES_INPUTS=experts.scales_inputs,
        )  # fmt: skip
    return y


def one_row_shape(size: int, group_size: int, *, pairs: bool, gates: bool) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and warps: the best of those measured on an H200."""
    block = max(group_size, min(1024, triton.next_power_of_2(size)))
    return 2 if gates or pairs else 4, block, max(1, min(2, block // 256) if pairs else min(4, block // 128))


def tile_shape(dtype: torch.dtype, rows: int, matrix: GroupScaledWeights, *, gates: bool) -> RowsShape:
    """The shape of programs for tiles of so many rows."""
    group_size, pairs = matrix.group_size, matrix.pairs
    if dtype == torch.float32:
        return RowsShape(32, max(32, group_size), 4, 2)
    block = max(128, group_size) if pairs or group_size < MIN_SUM_GROUP else group_size
    if rows > 64:
        num_stages = 3 if matrix.more is None else 2  # an Ada GPU has 99 KiB of shared memory for a block
        return RowsShape(64, block, 8, num_stages, weights_first=True)
    return RowsShape(64, block, 4, 3, weights_first=rows > 32)


# ---- layers as the kernels read them ----


def group_scaled_experts(experts: Experts) -> GroupScaledExperts:
    matrices: list[Any] = [experts.gate_up_proj, experts.down_proj]
    gate_up, down = (
        group_scaled_weights(matrix, bias) for matrix, bias in zip(matrices, experts.biases(slice(None)), strict=True)
    )
    limits = {} if experts.limit is None else {"limit": experts.limit.size, "alpha": experts.limit.alpha}
    return GroupScaledExperts(gate_up=gate_up, down=down, scales_inputs=experts.scales_inputs, **limits)


def group_scaled_weights(stack: ExpertStack, bias: Tensor | None) -> GroupScaledWeights:
    tensors = dict(stack.named_buffers())
    weight = tensors["weight"]
    if isinstance(stack.layout, CodeLayout):
        return GroupScaledWeights(
            weight=weight,
            scales=tensors["scales"],
            codes=Codes(stack.layout, table_tensor(stack.layout, weight.device)),
            group_size=stack.layout.size,
            bias=bias,
        )
    if isinstance(stack.layout, GroupLayout):
        return GroupScaledWeights(
            weight=weight,
            scales=tensors["scales"],
            bits=pair_bits(stack.layout),
            more=tensors.get("more"),
            minimums=tensors.get("minimums"),
            factors=tensors.get("factors"),
            group_size=stack.layout.size,
            bias=bias,
        )
    scales = tensors["scale"]
    return GroupScaledWeights(weight=weight, scales=scales, group_size=weight.shape[-1] // scales.shape[-1], bias=bias)


def is_group_scaled(matrix: object) -> bool:
    """Whether the weights of experts are codes or levels, or 8-bit numbers with scales of groups."""
    if not isinstance(matrix, ExpertStack):
        return False
    scale = dict(matrix.named_buffers()).get("scale")
    return isinstance(matrix, CudaCodedStack | CudaGroupedStack) or (scale is not None and scale.dim() > 2)
