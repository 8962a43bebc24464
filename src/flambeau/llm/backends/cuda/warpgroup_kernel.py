"""Linear layers for up to 128 rows by a CUDA kernel (csrc/warpgroup_rows.cu); the plain version is the layer.

NVRTC compiles the kernel for each kind of weights, number of rows and shape of a block. Layers that it does not support
are left to linear.py, and so are those for which other kernels are faster.

Shapes: T rows · N outputs · K inputs · S parts of a sum
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cuda import few_row_kernel
from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.backends.cuda.few_row_kernel import (
    BFLOAT16,
    FP8,
    INT4,
    INT4_PIECE,
    INT8,
    addresses,
    driver,
    integers,
    kind_of,
    launch_early,
    sums_for,
)

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "warpgroup_rows.cu"
MAX_ROWS = 128
# Kind → rows for which it was faster than the others on an H200: few_row_kernel, and PyTorch for many rows.
BEST_ROWS = {BFLOAT16: range(2, 65), **dict.fromkeys((INT8, FP8, INT4), range(33, MAX_ROWS + 1))}
PADDED_ROWS = (8, 16, 24, 32, 48, 64, 96, MAX_ROWS)  # for which the kernel is compiled
TILE = 16  # outputs, with gates
MAX_TILES = 12  # of a block
WARPS = 4  # of a warpgroup
PLANE = 64  # inputs of all rows that lie together in shared memory
MULTIPROCESSOR_BYTES = 228 << 10  # of shared memory
RESERVED_BYTES = 1 << 10  # of each block
STAGES = range(8, 1, -1)
ENOUGH_STAGES = 3
MAX_ROWS_OF_ONE = 32  # with bfloat16 weights: one block for each multiprocessor; more rows were not measured with one
PARTS = (1, 2, 4, 8)
PART_COST = 8 / 132  # bytes of a multiprocessor, of writing and adding up one number of one more part


@dataclass(frozen=True, slots=True)
class WarpgroupBlock:
    """How a block computes its outputs."""

    groups: int  # warpgroups
    tiles: int  # of 16 outputs
    chunk: int  # bytes of a row of weights in a stage
    stages: int
    per_processor: int  # blocks that fit on a multiprocessor
    planes: int = 1  # of 64 inputs in a stage, if adapters need more than a chunk of inputs

    @property
    def threads(self) -> int:
        return 32 * WARPS * self.groups

    def shared_bytes(self, kind: int, rows: int) -> int:
        inputs = chunk_inputs(kind, self.chunk)
        operand = 2 * rows * inputs
        warps = WARPS * self.groups
        tiles = -(-self.tiles // warps) * warps if kind == BFLOAT16 else self.tiles
        scales = -(-self.tiles * inputs // 1024) * 1024 if kind == INT4 else 0
        stage = tiles * TILE * self.chunk + max(operand, 2 * rows * PLANE * self.planes) + scales
        return self.stages * (stage + 8) + (2 * operand if kind != BFLOAT16 else 0)


@dataclass(frozen=True, slots=True)
class WarpgroupDivision:
    """How the work of a layer is divided."""

    block: WarpgroupBlock
    parts: int = 1  # into which sums are split


@dataclass(frozen=True, slots=True)
class ProductAdapters:
    """What a product computes for adapters beside its own; see `warpgroup_rows.cu`."""

    inner: int = 0  # inputs that are added: x times A, for all slots
    segments: int = 0  # of the outputs, each with inner inputs of its own
    shrunk: int = 0  # outputs that are added: x times A, for all slots


NO_ADAPTERS = ProductAdapters()


def best_division(
    kind: int,
    width: int,
    size: int,
    num_rows: int,
    num_processors: int,
    *,
    gates: bool,
    adapters: ProductAdapters = NO_ADAPTERS,
) -> WarpgroupDivision | None:
    """How a layer's work is divided; None: other kernels are better, or the kernel cannot compute it.

    Each multiprocessor gets about the same number of tiles. With more parts, it reads fewer inputs for its weights.
    """
    chunk = 64 if kind == INT4 else 128
    inputs = chunk_inputs(kind, chunk)
    if num_rows not in BEST_ROWS.get(kind, ()) or width > few_row_kernel.MAX_WIDTH:
        return None
    if size % inputs or width % (TILE // 2 if gates else TILE):
        return None
    rows, num_tiles = padded(num_rows), width * (2 if gates else 1) // TILE
    costs: dict[WarpgroupDivision, float] = {}
    for parts in PARTS[:1] if gates else (parts for parts in PARTS if parts <= size // inputs):
        rounds, tiles = tiles_of_block(num_tiles, adapters.shrunk // TILE, parts, num_processors)
        block = block_shape(kind, rows, tiles, chunk, max(1, adapters.segments))
        if block is not None:
            read = TILE * tiles * (size + adapters.inner) * chunk // inputs + 2 * rows * (
                size + adapters.inner
            )  # bytes
            costs[WarpgroupDivision(block, parts)] = rounds * read / parts + PART_COST * parts * rows * width
    return min(costs, key=lambda division: costs[division], default=None)


def tiles_of_block(num_tiles: int, added: int, parts: int, num_processors: int) -> tuple[int, int]:
    """Blocks that a multiprocessor computes one after another, and their tiles; `added` tiles have other blocks."""
    rounds = -(-(num_tiles + added) * parts // (num_processors * MAX_TILES))
    tiles = -(-(num_tiles + added) * parts // (num_processors * rounds))
    if added:
        while (-(-num_tiles // tiles) + -(-added // tiles)) * parts > num_processors * rounds:
            rounds, tiles = (rounds, tiles + 1) if tiles < MAX_TILES else (rounds + 1, 1)
    return rounds, tiles


def block_shape(kind: int, rows: int, tiles: int, chunk: int, planes: int = 1) -> WarpgroupBlock | None:
    """The first arrangement of `blocks_each` with enough stages and registers; None: none fits."""
    for per_processor in blocks_each(kind, rows):
        room = MULTIPROCESSOR_BYTES // per_processor - RESERVED_BYTES
        shapes = (WarpgroupBlock(-(-tiles // WARPS), tiles, chunk, stages, per_processor, planes) for stages in STAGES)
        shape = next((shape for shape in shapes if shape.shared_bytes(kind, rows) <= room), None)
        if shape is not None and shape.stages >= ENOUGH_STAGES:
            return shape
    return None


def blocks_each(kind: int, rows: int) -> tuple[int, ...]:
    """How many blocks a multiprocessor may have, the faster number first.

    A whole step of the 7B shape in bfloat16 took 4.24 ms with one and 4.29 with two for 32 rows, 3.64 and 3.72 for 8.
    """
    if kind == BFLOAT16:
        return (1, 2) if rows <= MAX_ROWS_OF_ONE else (2, 1)
    return (2, 1) if rows <= few_row_kernel.MAX_ROWS else (1,)


def chunk_inputs(kind: int, chunk: int) -> int:
    """The number of inputs whose weights take so many bytes."""
    return chunk // 2 if kind == BFLOAT16 else 2 * chunk if kind == INT4 else chunk


def padded(num_rows: int) -> int:
    return next(rows for rows in PADDED_ROWS if rows >= num_rows)


def division(
    x: Tensor, linear: nn.Module, width: int, num_rows: int, *, gates: bool, adapters: ProductAdapters = NO_ADAPTERS
) -> WarpgroupDivision | None:
    """`best_division` for a layer and the GPU of its inputs."""
    kind = kind_of(linear) if x.dtype == torch.bfloat16 and few_row_kernel.runs_on(x.device) else None
    if kind is None:
        return None
    num_processors: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return best_division(kind, width, x.shape[1], num_rows, num_processors, gates=gates, adapters=adapters)


def multiply(
    x: Tensor, linear: Any, scales: Tensor | None, width: int, division: WarpgroupDivision, *, gates: bool
) -> Tensor | None:
    """[T, K] to [T, N], or to parts [S, T, N] of the sum in float32; None if the kernel cannot be compiled here."""
    kind, block = kind_of(linear), division.block
    assert kind is not None
    rows, group = padded(len(x)), getattr(linear, "group_size", INT4_PIECE)
    function = compiled(kind, block, rows, group, gates=gates, device=x.device)
    if function is None:
        return None
    y = sums_for(x, width, division.parts)
    num_tiles = width * (2 if gates else 1) // TILE
    scales_map = TensorMap()
    if scales is not None and kind == INT4:
        inputs = chunk_inputs(kind, block.chunk), block.tiles
        scales_map = tensor_map(scales.data_ptr(), (x.shape[1], num_tiles), (x.shape[1],), inputs, 0)
    maps = [rows_map(x, rows), weights_map(linear.weight, num_tiles, block, gates=gates), scales_map]
    tensors = None if kind == INT4 else scales, linear.bias, y
    numbers = len(x), width, x.shape[1]
    grid = -(-num_tiles // block.tiles), division.parts
    launch_early(
        function, grid, block.threads, block.shared_bytes(kind, rows), [*maps, *addresses(tensors), *integers(numbers)]
    )
    return y


def multiply_with_adapters(
    x: Tensor,
    linear: Any,
    width: int,
    division: WarpgroupDivision,
    inner_TX: Tensor,
    b_OX: Tensor,
    starts: Sequence[int],
    *,
    gates: bool,
) -> Tensor:
    """As `multiply`, of bfloat16 weights, with adapters: what belongs to a segment of `inner_TX` times the rows of B.

    Segments begin at the outputs `starts`; with gates, they are the gates and what they gate.
    """
    block, rows = division.block, padded(len(x))
    function = compiled(BFLOAT16, block, rows, 0, gates=gates, device=x.device, segments=len(starts))
    y, num_tiles = sums_for(x, width, division.parts), width * (2 if gates else 1) // TILE
    matrices = (weights_map(matrix, num_tiles, block, gates=gates) for matrix in (linear.weight, b_OX))
    weights, second = matrices
    numbers = b_OX.shape[1], 0, *(*starts[1:], width, width)[:2]
    arguments = [
        *(rows_map(x, rows), weights, TensorMap()), *addresses((None, linear.bias, y)),
        *integers((len(x), width, x.shape[1])), second, rows_map(inner_TX, rows), *addresses((None,)),
        *integers(numbers),
    ]  # fmt: skip
    grid = -(-num_tiles // block.tiles), division.parts
    launch_early(function, grid, block.threads, block.shared_bytes(BFLOAT16, rows), arguments)
    return y


def multiply_and_shrink(
    x: Tensor, linear: Any, width: int, division: WarpgroupDivision, a_XK: Tensor
) -> tuple[Tensor, Tensor]:
    """As `multiply`, of bfloat16 weights, and parts [S, T, X] of x times A."""
    block, rows = division.block, padded(len(x))
    function = compiled(BFLOAT16, block, rows, 0, gates=False, device=x.device, appends=True)
    y, shrunk = sums_for(x, width, division.parts), torch.empty(division.parts, len(x), len(a_XK), device=x.device)
    num_blocks, more = (-(-outputs // TILE // block.tiles) for outputs in (width, len(a_XK)))
    weights, second = (weights_map(matrix, len(matrix) // TILE, block, gates=False) for matrix in (linear.weight, a_XK))
    arguments = [
        *(rows_map(x, rows), weights, TensorMap()), *addresses((None, linear.bias, y)),
        *integers((len(x), width, x.shape[1])), second, TensorMap(), *addresses((shrunk,)),
        *integers((len(a_XK), num_blocks, 0, 0)),
    ]  # fmt: skip
    grid = num_blocks + more, division.parts
    launch_early(function, grid, block.threads, block.shared_bytes(BFLOAT16, rows), arguments)
    return y, shrunk


@functools.cache
def compiled(
    kind: int, block: WarpgroupBlock, rows: int, group: int, *, gates: bool, device: torch.device, segments: int = 0,
    appends: bool = False,
) -> Any:  # fmt: skip
    """The kernel's function on a device; None if it cannot be compiled."""
    try:
        source = source_of(kind, block, rows, group, gates=gates, segments=segments, appends=appends)
        shared_bytes = block.shared_bytes(kind, rows)
        return compile_kernel(source, "warpgroup_rows", capability="90a", shared_bytes=shared_bytes)
    except Exception as error:
        log.warning("steps of several sequences are slower: their kernel cannot be compiled here (%s)", error)
        return None


def source_of(
    kind: int, block: WarpgroupBlock, rows: int, group: int, *, gates: bool, segments: int = 0, appends: bool = False
) -> str:
    numbers = {
        "WT": kind, "NR": rows, "WM": block.groups, "TILES": block.tiles, "STAGES": block.stages, "CHUNK": block.chunk,
        "GROUP": group, "GATED": int(gates), "BLOCKS": block.per_processor, "SEGMENTS": segments,
        "APPENDS": int(appends),
    }  # fmt: skip
    lines = [f"#define {name} {value}\n" for name, value in numbers.items()]
    return "".join([*lines, *wgmma_macros(rows), SOURCE.read_text()])


def wgmma_macros(rows: int) -> tuple[str, str]:
    """Macros for c += a · b, 64 outputs and 16 inputs: with weights in registers, and in shared memory."""
    count = rows // 2  # sums of a thread
    name = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    sums = ", ".join(f"%{number}" for number in range(count))
    weights = ", ".join(f"%{number}" for number in range(count, count + 4))
    operands = ", ".join(f'"+f"((c)[{number}])' for number in range(count))
    registers = ", ".join(f'"r"((a)[{number}])' for number in range(4))
    return (
        f'#define WGMMA(c, a, b) asm volatile("{name} {{{sums}}}, {{{weights}}}, %{count + 4}, 1, 1, 1, 0;" '
        f': {operands} : {registers}, "l"(b))\n',
        f'#define WGMMA_SHARED(c, a, b) asm volatile("{name} {{{sums}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;" '
        f': {operands} : "l"(a), "l"(b))\n',
    )


# ---- what the copy engine is told ----

SWIZZLE_64, SWIZZLE_128 = 2, 3  # rows of so many bytes, whose pieces change places
BYTES, LINES_OF_256 = 0, 3  # a type of numbers; what the L2 cache loads at once
MAP_SIZE, MAP_ALIGNMENT = 128, 64
TensorMap = ctypes.c_byte * MAP_SIZE


def rows_map(x: Tensor, rows: int) -> Any:
    """[T, K] of 16 bits, of which one copy loads 64 inputs of all rows."""
    row = 2 * x.shape[1]
    return tensor_map(x.data_ptr(), (row, len(x)), (row,), (2 * PLANE, rows), SWIZZLE_128)


def weights_map(weight: Tensor, num_tiles: int, block: WarpgroupBlock, *, gates: bool) -> Any:
    """[tiles, 2, 8, bytes of a row]: 16 rows; or 8 and those that they gate."""
    row = weight.stride(0) * weight.element_size()
    eight = 8 * row
    strides = (row, num_tiles * eight, eight) if gates else (row, eight, 2 * eight)
    swizzle = SWIZZLE_128 if block.chunk == 128 else SWIZZLE_64
    return tensor_map(weight.data_ptr(), (row, 8, 2, num_tiles), strides, (block.chunk, 8, 2, block.tiles), swizzle)


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int) -> Any:
    """A tensor of bytes, the last dimension first, and the box of it that one copy loads, with zeros outside of it."""
    rank, room = len(sizes), ctypes.create_string_buffer(MAP_SIZE + MAP_ALIGNMENT)
    found = TensorMap.from_buffer(room, -ctypes.addressof(room) % MAP_ALIGNMENT)
    error = driver().cuTensorMapEncodeTiled(
        ctypes.byref(found), BYTES, rank, ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, swizzle, LINES_OF_256, 0,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"the driver rejects a tensor of {tuple(sizes)} bytes: error {error}")
    return found
