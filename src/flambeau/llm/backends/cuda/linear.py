"""Linear layers for a few rows, in Triton: they are bound by reading the matrix once. The plain version is the layer.

One row is multiplied by plain threads, several rows by tensor cores. With tensor cores, a matrix with few outputs is
split along its inputs among several programs; the next kernel adds up their sums. Many rows are bound by arithmetic,
where torch's own products are best.

Kernels for one row start while the kernel before them ends. They read their weights before they wait for their input.

Shapes: T rows · N outputs · K inputs · S parts of a sum
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from flambeau.llm.backends.cuda import few_row_kernel, warpgroup_kernel
from flambeau.llm.backends.cuda.dequantize import is_fast, widen
from flambeau.llm.backends.cuda.int4 import gate_rows, multiply_one_row_int4, multiply_rows_int4
from flambeau.llm.backends.cuda.launch import overlap_options, store_one_row, store_rows, wait_for_previous
from flambeau.llm.models.architecture import Activation

MAX_ROWS = 64
MAX_KERNEL_ROWS = warpgroup_kernel.MAX_ROWS
MAX_WIDENED_ROWS = 2 * MAX_KERNEL_ROWS  # widening integers beforehand takes as long as several launches
MIN_ROWS = 16  # of a product on tensor cores
PROGRAMS = 256  # about two for each of the 132 multiprocessors of an H200
MAX_PARTS = 4
INT4_COLUMNS = 128
GATE_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def multiply_one_row(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    GATES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row; in a gated layer each is the product of two that are N rows apart."""
    n = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_output = n < N
    k = tl.arange(0, BLOCK)
    rows = weight_ptr + n[:, None].to(tl.int64) * K
    mask = is_output[:, None] & (k < K)[None, :]
    weights = tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATES:
        others = tl.load(rows + N * K + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([EACH, BLOCK], tl.float32)
    other_sums = tl.zeros([EACH, BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        place = start + k
        if start > 0:
            mask = is_output[:, None] & (place < K)[None, :]
            weights = tl.load(rows + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            if GATES:
                others = tl.load(rows + N * K + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        sums += weights.to(tl.float32) * x[None, :]
        if GATES:
            other_sums += others.to(tl.float32) * x[None, :]
    y = tl.sum(sums, 1)
    other = tl.sum(other_sums, 1)
    if HAS_SCALE:
        y *= tl.load(scale_ptr + n, mask=is_output, other=0.0).to(tl.float32)
        if GATES:
            other *= tl.load(scale_ptr + N + n, mask=is_output, other=0.0).to(tl.float32)
    store_one_row(y, other, bias_ptr, y_ptr, n, is_output, N, GATES, HAS_BIAS, ACTIVATION)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def multiply_rows(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, T,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows, or one part of their sums."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    t = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    is_row, is_column = t < T, n < N
    columns = weight_ptr + n[:, None].to(tl.int64) * K
    share: tl.constexpr = (K + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    wait_for_previous(OVERLAPS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    other_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, share, BLOCK):
        place = part * share + start + k
        is_place = place < K
        x = tl.load(x_ptr + t[:, None] * K + place[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
        mask = is_column[:, None] & is_place[None, :]
        weights = tl.load(columns + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(x, tl.trans(widen(weights, x.dtype, FAST)), sums, input_precision="ieee")
        if GATES:
            others = tl.load(columns + N * K + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            other_sums = tl.dot(x, tl.trans(widen(others, x.dtype, FAST)), other_sums, input_precision="ieee")
    if HAS_SCALE:
        sums *= tl.load(scale_ptr + n, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATES:
            other_sums *= tl.load(scale_ptr + N + n, mask=is_column, other=0.0).to(tl.float32)[None, :]
    store_rows(sums, other_sums, bias_ptr, y_ptr, n, t, part, T, N, GATES, HAS_BIAS, ACTIVATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLinear:
    """A linear layer with its tensors as the kernels read them."""

    layer: nn.Module
    weight: Tensor  # [N, K]; 4-bit weights: two in a byte
    bias: Tensor | None = None
    gates: bool = False  # half of the outputs gate the other half
    activation: Activation | None = None  # of the outputs, or of the gates
    scale: Tensor | None = None  # of each output [N], or of each group
    minimums: Tensor | None = None  # of each group of 4-bit weights
    group_size: int = 0  # of 4-bit weights
    kernel_scales: Tensor | None = None  # of quantized weights, as the CUDA kernel reads them

    @property
    def width(self) -> int:
        """The number of outputs without gates."""
        return self.weight.shape[0] // (2 if self.gates else 1)

    @property
    def options(self) -> dict[str, bool | str]:
        """What the kernels are compiled for."""
        return {"GATES": self.gates, "ACTIVATION": self.activation or ""}

    @property
    def has_kernel(self) -> bool:
        """Whether the CUDA kernel for a few rows knows the activation."""
        return self.activation == ("silu" if self.gates else None)

    @property
    def size(self) -> int:
        """The number of inputs."""
        return self.weight.shape[1] * (2 if self.group_size else 1)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N], or to parts [S, T, N] of that sum; a gated layer has half as many outputs."""
        if not len(x):
            return x.new_empty(0, self.width)
        if len(x) <= MAX_ROWS:
            return one_row(x, self) if len(x) == 1 else few_rows(x, self)
        if len(x) <= MAX_KERNEL_ROWS and (found := by_cuda_kernel(x, self, len(x))) is not None:
            return found
        if not self.weight.dtype.is_floating_point and len(x) <= MAX_WIDENED_ROWS:
            pieces = torch.split(x, MAX_KERNEL_ROWS)
            return torch.cat([few_rows(some, self, MAX_KERNEL_ROWS) for some in pieces], dim=-2)
        y: Tensor = self.layer(x)
        return y if self.activation is None else activate(y, self)


def one_row(x: Tensor, linear: KernelLinear, out: Tensor | None = None) -> Tensor:
    """[1, K] to [1, N]."""
    width, size = linear.width, linear.size
    y = torch.empty((1, width), dtype=x.dtype, device=x.device) if out is None else out
    each, block, warps = one_row_shape(size, linear.weight.dtype)
    options = {**linear.options, "HAS_BIAS": linear.bias is not None, "num_warps": warps, **overlap_options(1)}
    sizes = {"N": width, "K": size, "EACH": each, "BLOCK": block}
    grid = (triton.cdiv(width, each),)
    if linear.group_size:
        int4_tensors = x, linear.weight, linear.scale, linear.minimums, linear.bias, y
        multiply_one_row_int4[grid](*int4_tensors, GROUP=linear.group_size, **sizes, **options)
    else:
        tensors = x, linear.weight, linear.scale, linear.bias, y
        multiply_one_row[grid](*tensors, HAS_SCALE=linear.scale is not None, **sizes, **options)
    return y


def by_cuda_kernel(x: Tensor, linear: KernelLinear, as_for_rows: int) -> Tensor | None:
    """As `few_rows`, by the CUDA kernels; None: others are better, or these cannot compute it."""
    if not linear.has_kernel:
        return None
    layer, scales, width, gates = linear.layer, linear.kernel_scales, linear.width, linear.gates
    few = few_row_kernel.division(x, layer, width, as_for_rows, gates=gates)
    if few is not None:
        return few_row_kernel.multiply(x, layer, scales, width, few, gates=gates)
    more = warpgroup_kernel.division(x, layer, width, as_for_rows, gates=gates)
    return None if more is None else warpgroup_kernel.multiply(x, layer, scales, width, more, gates=gates)


def few_rows(x: Tensor, linear: KernelLinear, as_for_rows: int = 0) -> Tensor:
    """[T, K] to [T, N], or to parts [S, T, N] of the sum in float32; as many parts as for a number of rows."""
    if (found := by_cuda_kernel(x, linear, as_for_rows or len(x))) is not None:
        return found
    if len(x) > MAX_ROWS:
        return torch.cat([few_rows(some, linear, MAX_ROWS) for some in torch.split(x, MAX_ROWS)], dim=-2)
    if linear.group_size:
        return few_rows_int4(x, linear)
    width, size, num_rows = linear.width, linear.size, len(x)
    columns, block, stages = few_rows_shape(x.dtype, linear.weight.dtype, gates=linear.gates)
    parts = 1 if linear.activation is not None else num_parts(width, columns)
    y = sums_for(x, width, parts)
    multiply_rows[(triton.cdiv(width, columns), parts)](
        x, linear.weight, linear.scale, linear.bias, y, num_rows,
        N=width, K=size, ROWS=padded(num_rows), COLUMNS=columns, BLOCK=block, PARTS=parts, **linear.options,
        HAS_SCALE=linear.scale is not None, HAS_BIAS=linear.bias is not None, FAST=is_fast(x.dtype),
        **overlap_options(num_rows), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y


def few_rows_int4(x: Tensor, linear: KernelLinear) -> Tensor:
    """As `few_rows`. A second kernel activates: sums of gates and values need too many registers."""
    outputs, size, num_rows = len(linear.weight), linear.size, len(x)
    rows = padded(num_rows)
    columns, block, weights_first = int4_rows_shape(x.dtype, rows)
    parts = num_parts(outputs, INT4_COLUMNS)  # the same for any number of rows: some may be computed separately
    is_sum = linear.activation is None
    y = sums_for(x, outputs, parts) if is_sum else torch.empty(parts, num_rows, outputs, device=x.device)
    multiply_rows_int4[(triton.cdiv(outputs, columns), parts)](
        x, linear.weight, linear.scale, linear.minimums, linear.bias, y, num_rows,
        N=outputs, K=size, GROUP=linear.group_size, ROWS=rows, COLUMNS=columns,
        GROUPS=max(1, block // linear.group_size), PARTS=parts, HAS_BIAS=linear.bias is not None,
        FAST=is_fast(x.dtype), WEIGHTS_FIRST=weights_first, **overlap_options(num_rows), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y if is_sum else activate(y, linear, x.dtype)


def activate(y: Tensor, linear: KernelLinear, dtype: torch.dtype | None = None) -> Tensor:
    """Outputs [T, N], or parts [S, T, N] of their sums, after the activation; the first half may gate the second."""
    parts, num_rows = y.shape[0] if y.dim() == 3 else 1, y.shape[-2]
    width = linear.width
    outputs = torch.empty(num_rows, width, dtype=dtype or y.dtype, device=y.device)
    gate_rows[(triton.cdiv(width, GATE_BLOCK), num_rows)](
        y, outputs, num_rows, N=width, PARTS=parts, BLOCK=GATE_BLOCK, **linear.options
    )
    return outputs


def sums_for(x: Tensor, width: int, parts: int) -> Tensor:
    """Outputs [T, N], or parts [S, T, N] of the sums in float32."""
    if parts == 1:
        return torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    return torch.empty(parts, len(x), width, device=x.device)


def padded(num_rows: int) -> int:
    return max(MIN_ROWS, triton.next_power_of_2(num_rows))  # type: ignore[no-any-return]


def one_row_shape(size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and warps: the best of those measured."""
    block, is_long = triton.next_power_of_2(size), size > 4096
    if dtype.itemsize > 1:
        return (1, 1024, 1) if is_long else (1, block, max(1, min(8, block // 512)))
    # Widening weights takes time too: inputs are read once for several outputs.
    return (4, min(512, block), 2) if dtype.is_floating_point and not is_long else (4, min(1024, block), 4)


def few_rows_shape(dtype: torch.dtype, weight_dtype: torch.dtype, *, gates: bool) -> tuple[int, int, int]:
    """Outputs of a program, inputs that it reads at a time, and pipeline stages: the best of those measured."""
    if dtype == torch.float32:
        return 32 if gates else 64, 64, 3
    return (64, 128, 3) if gates else (64, 64, 5) if weight_dtype.itemsize > 1 else (64, 128, 4)


def int4_rows_shape(dtype: torch.dtype, rows: int) -> tuple[int, int, bool]:
    """Outputs of a program, inputs that it reads at a time, and whether weights are the first operand."""
    if dtype == torch.float32:
        return 32, 64, False
    # From 64 rows on, tensor cores take only the first operand from registers, where the widened weights are.
    return (64, 256, True) if rows > 32 else (INT4_COLUMNS, 128, False)


def num_parts(width: int, columns: int) -> int:
    """Into how many parts sums are split, so that there are enough programs."""
    parts = 1
    while parts < MAX_PARTS and parts * -(-width // columns) < PROGRAMS:
        parts *= 2
    return parts
