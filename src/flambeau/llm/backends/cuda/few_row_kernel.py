"""Quantized linear layers for 2 to 32 rows by a CUDA kernel (csrc/few_rows.cu); the plain version is the layer.

NVRTC compiles the kernel for each kind of weights and number of rows. Layers that it does not support, and those for
which the Triton kernels are as fast, are left to linear.py.

Shapes: T rows · N outputs · K inputs · S parts of a sum · O rows of weights · G groups of 4-bit weights
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.row_scaled import RowScaledLinear

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "few_rows.cu"
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


@functools.cache
def runs_on(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == CAPABILITY
    )


def division(x: Tensor, linear: nn.Module, width: int, num_rows: int, *, gates: bool) -> Division | None:
    """`best_division` for a layer and the GPU of its inputs."""
    kind = kind_of(linear) if x.dtype == torch.bfloat16 and runs_on(x.device) else None
    if kind is None:
        return None
    num_processors: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return best_division(kind, width, x.shape[1], num_rows, num_processors, gates=gates)


def multiply(
    x: Tensor, linear: Any, scales: Tensor | None, width: int, division: Division, *, gates: bool
) -> Tensor | None:
    """[T, K] to [T, N], or to parts [S, T, N] of the sum in float32; None if the kernel cannot be compiled here."""
    num_rows, size = x.shape
    kind, block, parts = kind_of(linear), division.block, division.parts
    assert kind is not None
    rows = -(-num_rows // ROWS_EACH) * ROWS_EACH
    group = getattr(linear, "group_size", INT4_PIECE)
    function = compiled(kind, block, rows, group, gates=gates, device=x.device)
    if function is None:
        return None
    if parts == 1:
        y = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    else:
        y = torch.empty(parts, num_rows, width, device=x.device)
    grid = -(-width * (2 if gates else 1) // block.outputs), parts
    tensors = x, linear.weight, scales, linear.bias, y
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    numbers = [ctypes.c_int(number) for number in (num_rows, width, size)]
    launch_early(function, grid, block.threads, block.shared_bytes(kind, rows), [*pointers, *numbers])
    return y


@functools.cache
def compiled(kind: int, block: BlockShape, rows: int, group: int, *, gates: bool, device: torch.device) -> Any:
    """The kernel's function on a device; None if it cannot be compiled."""
    numbers = {
        "WT": kind, "WM": block.team, "MT": block.tiles, "NT": rows // ROWS_EACH, "WK": block.teams,
        "STAGES": block.stages, "GROUP": group, "GATED": int(gates), "OVERLAPS": AFTER_SUMS,
    }  # fmt: skip
    source = "".join(f"#define {name} {value}\n" for name, value in numbers.items()) + SOURCE.read_text()
    try:
        compile_kernel = torch.cuda._compile_kernel
        kernel = compile_kernel(source, "few_rows", compute_capability="90", nvcc_options=["-std=c++17"])
        kernel.set_shared_memory_config(block.shared_bytes(kind, rows))
    except Exception as error:
        log.warning("steps of several sequences are slower: their kernel cannot be compiled here (%s)", error)
        return None
    return kernel.func


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
