"""Quantized linear layers for 2 to 32 rows by a CUDA kernel (csrc/few_rows.cu); the plain version is the layer.

NVRTC compiles the kernel for each kind of weights and number of rows. Layers that it does not support, and those for
which the Triton kernels are as fast, are left to linear.py.

Shapes: T rows · N outputs · K inputs · S parts of a sum · O rows of weights · G groups of 4-bit weights
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.row_scaled import RowScaledLinear

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "few_rows.cu"
STREAM_SOURCE = Path(__file__).parent / "csrc" / "stream.cuh"
BFLOAT16, INT8, FP8, INT4 = range(4)  # kinds of weights, as in the kernels
INT4_PIECE = 64  # weights for which the kernels read one scale
CAPABILITY = (9, 0)  # the only one that it was tested on
CHUNK = {INT8: 64, FP8: 64, INT4: 128}  # inputs of 64 bytes of a row of weights
ROWS_EACH = 8
MAX_ROWS = 32
WIDE = 6000  # outputs from which on blocks may have more of them
MAX_WIDTH = 20000  # wider ones, such as the vocabulary, fill the GPU in any case: the Triton kernels are as fast
PARTS = (1, 2, 4, 6, 8)
PART_COST = 0.1  # of writing and adding up one more part
AFTER_SUMS = 2  # when the next kernel may start: as OVERLAPS in the kernel
# The scales of int4 layers as the kernels read them, by whether the layer is gated.
INTERLEAVED: WeakKeyDictionary[nn.Module, dict[bool, Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How a block divides its work."""

    team: int  # warps that share inputs
    tiles: int  # 16 outputs of a warp each
    teams: int  # that divide the inputs
    stages: int
    per_processor: int = 1  # blocks that fit on a multiprocessor

    @property
    def outputs(self) -> int:
        return 16 * self.team * self.tiles

    @property
    def threads(self) -> int:
        return 32 * self.team * self.teams

    def shared_bytes(self, kind: int, rows: int) -> int:
        planes, plane = CHUNK[kind] // 32, rows * 64 + 64
        weights = self.team * self.tiles * (1024 + (128 if kind == INT4 else 0))
        sums = rows * (self.outputs + 4 + 1) * 4
        return self.teams * max(self.stages * (weights + planes * plane), sums)


@dataclass(frozen=True, slots=True)
class Division:
    """How the work of a layer is divided."""

    block: BlockShape
    parts: int = 1  # into which sums are split

    def num_groups(self, width: int) -> int:
        """Blocks that have different outputs."""
        return -(-width // self.block.outputs)


class RowFactors(NamedTuple):
    """What the rows of x are to be multiplied with: the inverse of their lengths."""

    squares_TG: Tensor  # parts of the sums of their squares
    epsilon: float

    @property
    def arguments(self) -> list[Any]:
        return [*addresses((self.squares_TG,)), *integers((self.squares_TG.shape[1],)), ctypes.c_float(self.epsilon)]


class StreamSums(NamedTuple):
    """The residual stream, to which outputs are added, and what the product after it needs."""

    x_TN: Tensor
    gains_N: Tensor
    y_TN: Tensor  # x times the gains
    squares_TG: Tensor  # parts of the sums of the squares of x

    @property
    def arguments(self) -> list[Any]:
        return [(ctypes.c_void_p * len(self))(*(tensor.data_ptr() for tensor in self))]


# (rows up to, kind) → blocks for gated layers, for wide ones and for others: the best of those measured on an H200.
Blocks = tuple[BlockShape, BlockShape, BlockShape]
EIGHT_BITS: Blocks = BlockShape(2, 6, 4, 3), BlockShape(2, 6, 2, 3, 2), BlockShape(2, 4, 4, 3)
EIGHT_BITS_8: Blocks = BlockShape(2, 6, 4, 4), BlockShape(2, 4, 2, 4, 3), BlockShape(2, 4, 2, 4, 3)
BLOCKS: dict[tuple[int, int], Blocks] = {
    (8, INT8): EIGHT_BITS_8,
    (8, FP8): EIGHT_BITS_8,
    (8, INT4): (BlockShape(1, 4, 4, 4, 2), BlockShape(2, 4, 2, 4, 2), BlockShape(2, 4, 2, 4, 2)),
    (32, INT8): EIGHT_BITS,
    (32, FP8): EIGHT_BITS,
    (32, INT4): (BlockShape(2, 6, 4, 2), BlockShape(2, 6, 2, 2, 2), BlockShape(2, 4, 2, 2, 2)),
}


# Kind → blocks for up to 8 rows that add to the residual stream, with two parts: the best of those measured with int8
# and int4; fp8 is like int8.
STREAM_ROWS, STREAM_PARTS = 8, 2
STREAM_BLOCKS = {INT8: BlockShape(1, 4, 8, 4), FP8: BlockShape(1, 4, 8, 4), INT4: BlockShape(1, 4, 8, 3)}
ENOUGH_WORK = 0.8  # of all multiprocessors


def best_division(
    kind: int, width: int, size: int, num_rows: int, num_processors: int, *, gates: bool
) -> Division | None:
    """How a layer's work is divided; None: the Triton kernels are better, or the kernel cannot compute it."""
    limit = next((limit for limit in (8, MAX_ROWS) if num_rows <= limit), None)
    if limit is None or (limit, kind) not in BLOCKS or size % CHUNK[kind] or width % (8 if gates else 16):
        return None
    gated, wide, other = BLOCKS[limit, kind]
    block = gated if gates else wide if width >= WIDE else other
    if width > MAX_WIDTH:
        return None
    if gates:
        return Division(block)
    num_tiles, slots = -(-width // block.outputs), num_processors * block.per_processor

    def cost(parts: int) -> float:
        rounds = -(-num_tiles * parts // slots)
        return rounds / parts * (1 + PART_COST * parts)

    return Division(block, min((parts for parts in PARTS if parts <= size // CHUNK[kind]), key=cost))


def stream_division(kind: int, width: int, size: int, num_rows: int, num_processors: int) -> Division | None:
    """The same for outputs that are added to the residual stream; None: a norm of its own is better after it."""
    if not 1 < num_rows <= STREAM_ROWS or size % CHUNK[kind] or size < STREAM_PARTS * CHUNK[kind] or width % 16:
        return None
    found = Division(STREAM_BLOCKS[kind], STREAM_PARTS)
    num_blocks = found.num_groups(width) * found.parts
    return found if num_blocks / (-(-num_blocks // num_processors) * num_processors) >= ENOUGH_WORK else None


@functools.cache
def runs_on(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == CAPABILITY
    )


def division(
    x: Tensor, linear: nn.Module, width: int, num_rows: int, *, gates: bool, streams: bool = False
) -> Division | None:
    """`best_division`, or `stream_division`, for a layer and the GPU of its inputs."""
    kind = kind_of(linear) if x.dtype == torch.bfloat16 and runs_on(x.device) else None
    if kind is None:
        return None
    num_processors: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    if streams:
        return stream_division(kind, width, x.shape[1], num_rows, num_processors) if kind in STREAM_BLOCKS else None
    return best_division(kind, width, x.shape[1], num_rows, num_processors, gates=gates)


def multiply(
    x: Tensor,
    linear: Any,
    scales: Tensor | None,
    width: int,
    division: Division,
    *,
    gates: bool,
    factors: RowFactors | None = None,
    stream: StreamSums | None = None,
) -> Tensor | None:
    """[T, K] to [T, N], or to parts [S, T, N] of the sum in float32; None if the kernel cannot be compiled here.

    With a `stream`, outputs are added to it, and the result is it times the gains.
    """
    num_rows, size = x.shape
    kind, block, parts = kind_of(linear), division.block, division.parts
    assert kind is not None
    function = compiled_for(x, linear, division, gates=gates, scaled=factors is not None, streams=stream is not None)
    if function is None:
        return None
    y = sums_for(x, width, parts) if stream is None else None
    grid = -(-width * (2 if gates else 1) // block.outputs), parts
    arguments = [
        *addresses((x, linear.weight, scales, linear.bias, y)), *integers((num_rows, width, size)),
        *(() if factors is None else factors.arguments), *(() if stream is None else stream.arguments),
    ]  # fmt: skip
    launch_early(function, grid, block.threads, block.shared_bytes(kind, padded(num_rows)), arguments)
    return y if stream is None else stream.y_TN


def compiled_for(
    x: Tensor, linear: Any, division: Division, *, gates: bool, scaled: bool = False, streams: bool = False
) -> Any:
    """`compiled` for a layer and so many rows."""
    kind = kind_of(linear)
    assert kind is not None
    return compiled(
        kind, division.block, padded(len(x)), getattr(linear, "group_size", INT4_PIECE), gates=gates, device=x.device,
        scaled=scaled, stream=division.parts if streams else 0,
    )  # fmt: skip


def padded(num_rows: int) -> int:
    return -(-num_rows // ROWS_EACH) * ROWS_EACH


def sums_for(x: Tensor, width: int, parts: int) -> Tensor:
    """Outputs [T, N], or parts [S, T, N] of the sums in float32."""
    if parts == 1:
        return torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    return torch.empty(parts, len(x), width, device=x.device)


def addresses(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def integers(numbers: Sequence[int]) -> list[Any]:
    return [ctypes.c_int(number) for number in numbers]


@functools.cache
def compiled(
    kind: int, block: BlockShape, rows: int, group: int, *, gates: bool, device: torch.device, scaled: bool = False,
    stream: int = 0,
) -> Any:  # fmt: skip
    """The kernel's function on a device; None if it cannot be compiled."""
    try:
        source = source_of(kind, block, rows, group, gates=gates, scaled=scaled, stream=stream)
        return compile_kernel(source, "few_rows", shared_bytes=block.shared_bytes(kind, rows))
    except Exception as error:
        log.warning("steps of several sequences are slower: their kernel cannot be compiled here (%s)", error)
        return None


def source_of(
    kind: int, block: BlockShape, rows: int, group: int, *, gates: bool, scaled: bool = False, stream: int = 0
) -> str:
    numbers = {
        "WT": kind, "WM": block.team, "MT": block.tiles, "NT": rows // ROWS_EACH, "WK": block.teams,
        "STAGES": block.stages, "GROUP": group, "GATED": int(gates), "OVERLAPS": AFTER_SUMS, "SCALED": int(scaled),
        "STREAM": stream,
    }  # fmt: skip
    lines = [f"#define {name} {value}\n" for name, value in numbers.items()]
    return "".join([*lines, STREAM_SOURCE.read_text(), SOURCE.read_text()])


# ---- layers as the kernels read them ----


def kind_of(linear: nn.Module) -> int | None:
    """The kind of a layer's weights; None if the kernels do not support them."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):  # a JoinedLinear
        return None
    if isinstance(linear, CudaInt4Linear):
        has_groups = linear.group_size in (INT4_PIECE, 2 * INT4_PIECE) and len(weight) % 16 == 0
        return INT4 if has_groups and linear.scales.dtype == torch.bfloat16 else None
    if isinstance(linear, RowScaledLinear) and linear.scale.dim() > 1:  # group_scaled.py
        return None
    if isinstance(linear, (RowScaledLinear, CudaFp8Linear)):
        return {torch.int8: INT8, torch.float8_e4m3fn: FP8}.get(weight.dtype)
    return BFLOAT16 if type(linear) is nn.Linear and weight.dtype == torch.bfloat16 else None


def kernel_scales(linear: Any, is_gated: bool) -> Tensor | None:
    """Scales of rows; for 4 bits, scale and minimum of each piece in the order of the kernels' tiles of 16 rows."""
    if isinstance(linear, nn.Linear):
        return None
    if not isinstance(linear, CudaInt4Linear):
        scale: Tensor = linear.scale
        return scale.flatten().float().contiguous()
    kept = INTERLEAVED.setdefault(linear, {})  # shared by the kernels
    if is_gated not in kept:
        kept[is_gated] = interleaved(linear, is_gated)
    return kept[is_gated]


def interleaved(linear: CudaInt4Linear, is_gated: bool) -> Tensor:
    both_OG2 = torch.stack((linear.scales, linear.minimums), -1)
    both_OG2 = both_OG2.repeat_interleave(linear.group_size // INT4_PIECE, dim=1)
    rows, pieces, _ = both_OG2.shape
    if is_gated:
        return both_OG2.view(2, rows // 16, 8, pieces, 2).permute(1, 3, 0, 2, 4).contiguous()
    return both_OG2.view(rows // 16, 16, pieces, 2).permute(0, 2, 1, 3).contiguous()


def tied_head(embedding: nn.Embedding | RowEmbedding) -> nn.Module:
    """A linear layer with the weights of the embedding."""
    if isinstance(embedding, RowEmbedding):
        return embedding.rows  # type: ignore[no-any-return]
    head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
    head.weight = embedding.weight
    return head


# ---- the driver ----


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6


def launch_early(function: Any, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: list[Any]) -> None:
    """Launch a kernel on the current stream that may start before the kernel before it has ended."""
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    attribute = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = LaunchConfig(
        grid=(*grid, 1),
        block=(threads, 1, 1),
        shared_bytes=shared_bytes,
        stream=torch.cuda.current_stream().cuda_stream,
        attributes=ctypes.pointer(attribute),
        num_attributes=1,
    )
    if error := driver().cuLaunchKernelEx(ctypes.byref(config), function, addresses, None):
        raise RuntimeError(f"the driver rejects a launch of {grid[0] * grid[1]} blocks: error {error}")


@functools.cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
