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

from flambeau.llm.backends.cuda.dequantize import is_fast, widen
from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous

MAX_SEARCHED = 1024  # pairs; more are sorted
MIN_ROWS = 16  # of a product on tensor cores
MAX_TILE_ROWS = 128


@triton.jit  # type: ignore[untyped-decorator]
def gate_up_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, chosen_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some gated outputs of one of the row's experts; gate and value are N rows of weights apart."""
    slot = tl.program_id(1)
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    k = tl.arange(0, BLOCK)
    wait_for_previous(OVERLAPS)
    expert = tl.load(chosen_ptr + slot).to(tl.int64)
    rows = weight_ptr + (expert * (2 * N) + n[:, None]) * K
    sums = tl.zeros([EACH, BLOCK], tl.float32)
    other_sums = tl.zeros([EACH, BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        place = start + k
        mask = is_output[:, None] & (place < K)[None, :]
        weights = tl.load(rows + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        others = tl.load(rows + N * K + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        sums += weights.to(tl.float32) * x[None, :]
        other_sums += others.to(tl.float32) * x[None, :]
    gate = tl.sum(sums, 1)
    value = tl.sum(other_sums, 1)
    if HAS_SCALE:
        gate *= tl.load(scale_ptr + expert * (2 * N) + n, mask=is_output, other=0.0).to(tl.float32)
        value *= tl.load(scale_ptr + expert * (2 * N) + N + n, mask=is_output, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(y_ptr + slot * N + n, y.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def down_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, chosen_ptr, weights_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of all of the row's experts, added up with their weights."""
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    k = tl.arange(0, BLOCK)
    mask = is_output[:, None] & (k < K)[None, :]
    # The experts were chosen before the kernel that gives the inputs, and that has waited for them.
    rows = weight_ptr + (tl.load(chosen_ptr).to(tl.int64) * N + n[:, None]) * K
    weights = tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(OVERLAPS)
    total = tl.zeros([EACH], tl.float32)
    sums = tl.zeros([EACH, BLOCK], tl.float32)
    for slot in tl.static_range(CHOSEN):
        expert = tl.load(chosen_ptr + slot).to(tl.int64)
        share = tl.load(weights_ptr + slot)
        rows = weight_ptr + (expert * N + n[:, None]) * K
        if HAS_SCALE:
            sums = tl.zeros([EACH, BLOCK], tl.float32)
        for start in tl.static_range(0, K, BLOCK):
            place = start + k
            if slot + start > 0:
                mask = is_output[:, None] & (place < K)[None, :]
                weights = tl.load(rows + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + slot * K + place, mask=place < K, other=0.0).to(tl.float32) * share
            sums += weights.to(tl.float32) * x[None, :]
        if HAS_SCALE:
            scale = tl.load(scale_ptr + expert * N + n, mask=is_output, other=0.0).to(tl.float32)
            total += tl.sum(sums, 1) * scale
    if not HAS_SCALE:
        total = tl.sum(sums, 1)
    tl.store(y_ptr + n, total.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def pairs_of_expert(chosen_ptr, expert, first, P, ROWS: tl.constexpr, SEARCHED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs of an expert [ROWS] from its number `first` on, and how many it has in all."""
    pair = tl.arange(0, SEARCHED)
    is_own = tl.load(chosen_ptr + pair, mask=pair < P, other=-1) == expert
    number = tl.cumsum(is_own.to(tl.int32), 0) - 1
    wanted = first + tl.arange(0, ROWS)
    is_found = is_own[None, :] & (number[None, :] == wanted[:, None])
    return tl.sum(tl.where(is_found, pair[None, :], 0), 1), tl.sum(is_own.to(tl.int32), 0)


@triton.jit(do_not_specialize=["T", "P"])  # type: ignore[untyped-decorator]
def multiply_pairs(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, chosen_ptr, weights_ptr, order_ptr, tiles_ptr, y_ptr, T, P,
    N: tl.constexpr, K: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, SEARCHED: tl.constexpr, TILES: tl.constexpr, GATES: tl.constexpr, HAS_SCALE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs of one expert.

    With GATES, inputs are rows and outputs are gated, for each pair; else inputs are those, and outputs [A, T, N] are
    weighted. SEARCHED is 0 if the pairs are sorted; else each expert has TILES programs, of which some have no pairs.
    """
    tile = tl.program_id(0)
    if SEARCHED > 0:
        expert = tile // TILES
        first = tile % TILES * ROWS
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
        columns = weight_ptr + (expert.to(tl.int64) * outputs + n[:, None]) * K
        x_row = pair // CHOSEN if GATES else pair
        x_rows = x_ptr + x_row[:, None].to(tl.int64) * K
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        other_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, K, BLOCK):
            place = start + k
            is_place = place < K
            x = tl.load(x_rows + place[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
            mask = is_column[:, None] & is_place[None, :]
            weights = tl.load(columns + place[None, :], mask=mask, other=0.0)
            sums = tl.dot(x, tl.trans(widen(weights, x.dtype, FAST)), sums, input_precision="ieee")
            if GATES:
                others = tl.load(columns + N * K + place[None, :], mask=mask, other=0.0)
                other_sums = tl.dot(x, tl.trans(widen(others, x.dtype, FAST)), other_sums, input_precision="ieee")
        if HAS_SCALE:
            scales = scale_ptr + expert.to(tl.int64) * outputs + n
            sums *= tl.load(scales, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if GATES:
                other_sums *= tl.load(scales + N, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATES:
            sums = sums / (1.0 + tl.exp(-sums)) * other_sums
            y_row = pair
        else:
            sums *= tl.load(weights_ptr + pair, mask=is_row, other=0.0)[:, None]
            y_row = pair % CHOSEN * T + pair // CHOSEN
        y_at = y_ptr + y_row[:, None].to(tl.int64) * N + n[None, :]
        tl.store(y_at, sums.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of all experts [N, outputs, inputs], and the scales [N, outputs] of quantized ones."""

    weight: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelExperts:
    """The experts of a layer with their tensors as the kernels read them."""

    gate_up: ExpertWeights  # [N, 2·F, E]
    down: ExpertWeights  # [N, E, F]

    def __call__(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """The weighted sums [T, E] of the experts' outputs, or parts [A, T, E] of them; indices are of 32 bits."""
        if len(x_TE) == 1:
            return one_row(x_TE, self, chosen_TA, weights_TA)
        return several_rows(x_TE, self, chosen_TA, weights_TA)


def one_row(x: Tensor, experts: KernelExperts, chosen: Tensor, weights: Tensor) -> Tensor:
    """[1, E] to [1, E]."""
    gate_up, down, num_chosen = experts.gate_up, experts.down, chosen.shape[1]
    _, size, width = down.weight.shape
    gated = torch.empty(num_chosen, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    each, block, warps = gate_up_shape(size, gate_up.weight.dtype)
    launch: Any = gate_up_one_row
    launch[(triton.cdiv(width, each), num_chosen)](
        x, gate_up.weight, gate_up.scale, chosen, gated,
        N=width, K=size, EACH=each, BLOCK=block, HAS_SCALE=gate_up.scale is not None,
        **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    each, block, warps = down_shape(width, down.weight.dtype)
    launch = down_one_row
    launch[(triton.cdiv(size, each),)](
        gated, down.weight, down.scale, chosen, weights, y,
        N=size, K=width, CHOSEN=num_chosen, EACH=each, BLOCK=block, HAS_SCALE=down.scale is not None,
        **overlap_options(1), num_warps=warps,
    )  # fmt: skip
    return y


def several_rows(x: Tensor, experts: KernelExperts, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, E] to [A, T, E]."""
    num_experts, size, width = experts.down.weight.shape
    (num_rows, num_chosen), num_pairs = chosen.shape, chosen.numel()
    rows = tile_rows(num_pairs, num_experts)
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if num_pairs <= MAX_SEARCHED:
        tiles = -(-num_rows // rows)  # of an expert: no row chooses it twice
        num_tiles, searched = num_experts * tiles, triton.next_power_of_2(num_pairs)
    else:
        tables = sorted_tiles(chosen, num_experts, rows)
        num_tiles, searched, tiles = len(tables[1]), 0, 0  # type: ignore[arg-type]
    is_few = num_rows <= MIN_ROWS * 4
    gated = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    y = torch.empty(num_chosen, num_rows, size, dtype=torch.float32 if is_few else x.dtype, device=x.device)
    products = (x, experts.gate_up, gated, width, size), (gated, experts.down, y, size, width)
    for given, matrix, outputs, num_outputs, num_inputs in products:
        gates = outputs is gated
        columns, block, warps, stages = tile_shape(x.dtype, matrix.weight.dtype, rows, gates=gates)
        launch: Any = multiply_pairs
        launch[(num_tiles, triton.cdiv(num_outputs, columns))](
            given, matrix.weight, matrix.scale, chosen, weights, *tables, outputs, num_rows, num_pairs,
            N=num_outputs, K=num_inputs, CHOSEN=num_chosen, ROWS=rows, COLUMNS=columns, BLOCK=block,
            SEARCHED=searched, TILES=tiles, GATES=gates, HAS_SCALE=matrix.scale is not None, FAST=is_fast(x.dtype),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def sorted_tiles(chosen_TA: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The pairs [P] in the order of their experts, and tiles [M, 3] of up to `rows` of one expert.

    A tile is its expert, its first place in that order and the end of the expert's places. M depends on the shape only:
    tiles that are not needed are empty.
    """
    experts_P, order_P = torch.sort(chosen_TA.flatten(), stable=True)
    num_pairs, device = len(order_P), chosen_TA.device
    numbers = torch.arange(num_experts + 1, dtype=experts_P.dtype, device=device)
    starts = torch.searchsorted(experts_P, numbers)
    num_tiles = -(-starts.diff() // rows)
    ends = num_tiles.cumsum(0)
    tiles_M = torch.arange(min(num_experts, num_pairs) + num_pairs // rows, device=device)
    expert_M = torch.searchsorted(ends, tiles_M, right=True)
    is_used = expert_M < num_experts
    expert_M = expert_M.clamp(max=num_experts - 1)
    first_M = starts[expert_M] + (tiles_M - (ends - num_tiles)[expert_M]) * rows
    stop_M = torch.where(is_used, starts[expert_M + 1], 0)
    return order_P, torch.stack((expert_M, first_M, stop_M), dim=1)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile: most experts have one tile if rows choose them evenly."""
    return min(MAX_TILE_ROWS, max(MIN_ROWS, triton.next_power_of_2(-(-num_pairs // num_experts))))  # type: ignore[no-any-return]


def gate_up_shape(size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and warps."""
    block = min(4096, triton.next_power_of_2(size))
    if dtype.itemsize > 1:
        return 1, block, max(1, min(8, block // 512))
    return 4, min(1024, block), 4


def down_shape(width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """The same for the outputs of all experts of a row."""
    block = min(1024, triton.next_power_of_2(width))
    return (1, block, 1) if dtype.itemsize > 1 else (4, block, 4)


def tile_shape(dtype: torch.dtype, weight_dtype: torch.dtype, rows: int, *, gates: bool) -> tuple[int, int, int, int]:
    """Outputs of a program, inputs that it reads at a time, warps and pipeline stages."""
    if dtype == torch.float32:
        return (32, 32, 4, 2) if rows > 32 else (32 if gates else 64, 64, 4, 3)
    if rows > 64:
        return 128, 64, 8, 3
    return (64, 128, 4, 3) if gates else (64, 64, 4, 5) if weight_dtype.itemsize > 1 else (64, 128, 4, 4)
