"""OneRowStep: a decode step of one sequence in five launches per layer (csrc/one_row.cu, csrc/one_token_attention.cu).

Norms are computed by the products after them, residual sums by the products before. Each kernel starts while the one
before it ends, and loads its first weights, or keys and values, before it waits. NVRTC compiles the kernels for the
network's shapes. The results are those of `CudaNetwork`, which computes all other steps.

Shapes: E hidden · V vocabulary · K inputs · N outputs
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.backends.cuda.few_row_kernel import (
    BFLOAT16,
    CAPABILITY,
    FP8,
    INT4,
    INT4_PIECE,
    INT8,
    kernel_scales,
    kind_of,
    launch_early,
    tied_head,
)
from flambeau.llm.backends.cuda.parts import TUNED
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.transformer import Transformer

if TYPE_CHECKING:
    from flambeau.llm.backends.cuda.feed_forward import SparseLayer

SOURCES = Path(__file__).parent / "csrc"
CHUNK = 512  # bytes that a warp reads at once
NUM_WARPS = {BFLOAT16: 8, INT8: 8, FP8: 8, INT4: 8}  # of a block, at least
MIN_WARPS, MAX_WARPS = 6, 16
MAX_CHUNKS = {BFLOAT16: 2, INT8: 2, FP8: 2, INT4: 2}  # of a row for one warp: inputs stay in registers
MOST_CHUNKS = 4
SHARED_BYTES = 112 << 10  # of a block: two kernels fit on a multiprocessor
MAX_RING = 32  # rows
WEIGHT_BITS = {BFLOAT16: 16, INT8: 8, FP8: 8, INT4: 4}
REHEARSES = False  # whether kernels run once without results while they wait, so that their instructions are cached
ROUND = 64  # blocks of rows between two epilogues, as in the kernel
ATTENTION_WARPS = 4
MAX_SPLITS = 8  # blocks of a cluster
ATTENTION_BLOCKS = 256
MAX_SIZE = 2048  # hidden
MAX_QUERIES = 8  # heads that share a key-value head: more need too many registers


@dataclass(frozen=True, slots=True)
class RowShape:
    """How a block multiplies a row."""

    warps: int
    team: int  # warps that divide the inputs; teams have different outputs
    chunks: int  # of a row of weights for one warp
    rows: int = 4  # of weights that a team takes at a time
    ring: int = 4  # rows of weights that a team has under way

    def shared_bytes(self, kind: int, size: int) -> int:
        """Of a block that multiplies `size` inputs."""
        scales = self.warps * (self.ring // self.rows) * self.chunks * 256 if kind == INT4 else 0
        inputs = size * 2 + (size // 2 if kind == INT4 else 0)
        sums = ROUND * self.rows * self.team * 4
        return self.warps * self.ring * self.chunks * CHUNK + scales + inputs + sums + 8 * self.warps


def row_shape(kind: int, size: int) -> RowShape | None:
    """The division with the fewest idle threads; None if a row is too long."""
    row_bytes = size * WEIGHT_BITS[kind] // 8
    found = shapes(row_bytes, NUM_WARPS[kind], MAX_CHUNKS[kind]) or shapes(row_bytes, MIN_WARPS, MOST_CHUNKS)
    return with_ring(min(found, key=lambda pair: pair[0])[1], kind, size) if found else None


def shapes(row_bytes: int, min_warps: int, max_chunks: int) -> list[tuple[float, RowShape]]:
    """Possible divisions with their costs: the share of idle threads, and a little for more warps."""
    num_chunks = -(-row_bytes // CHUNK)
    found = []
    for warps in range(min_warps, MAX_WARPS + 1):
        for chunks in range(1, max_chunks + 1):
            team = -(-num_chunks // chunks)
            if warps % team == 0:
                idle = chunks * team / num_chunks - 1
                found.append((idle + 0.01 * warps - 0.01 * chunks, RowShape(warps, team, chunks)))
    return found


def with_ring(shape: RowShape, kind: int, size: int) -> RowShape | None:
    """With as many rows under way as fit; rows of 4-bit weights share loads of their scales."""
    fitting = [
        each
        for rows in ((4,) if kind == INT4 else (4, 2))
        for ring in range(rows, MAX_RING + 1, rows)
        if (each := replace(shape, rows=rows, ring=ring)).shared_bytes(kind, size) <= SHARED_BYTES
    ]
    return max(fitting, key=lambda each: (each.ring, each.rows), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernel:
    """A linear layer for one row, with the norm before it or the residual sum after it."""

    function: Any
    shape: RowShape
    shared_bytes: int
    num_blocks: int
    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    gain: Tensor | None
    width: int
    epsilon: float
    factor: float  # of what is added to the residual stream

    def __call__(self, x: Tensor, out: Tensor, added: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """Into `out`. A kernel that adds to the residual stream reads `x` and `added`, and stores the sum in `kept`."""
        tensors = pointers_of(x, self.weight, self.scales, self.bias, self.gain, out)
        numbers = [ctypes.c_int(self.width), ctypes.c_float(self.epsilon), ctypes.c_float(self.factor)]
        arguments = [*tensors, *numbers, *pointers_of(added, kept)]
        launch_early(self.function, (self.num_blocks, 1), 32 * self.shape.warps, self.shared_bytes, arguments)
        return out


def pointers_of(*tensors: Tensor | None) -> list[Any]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def row_kernel(
    linear: Any,
    *,
    gain: Tensor | None = None,
    adds: bool = False,
    gates: bool = False,
    residual: bool = False,
    wide: bool = False,
    epsilon: float = 0.0,
    factor: float = 1.0,
) -> RowKernel:
    """`gain`: inputs are normalized; `adds`: another row is added before; `residual`: outputs are added to `out`.

    `wide`: outputs are float32.
    """
    kind, weight = kind_of(linear), linear.weight
    assert kind is not None
    size = inputs_of(linear)
    shape = row_shape(kind, size)
    assert shape is not None
    names = {
        "WT": kind, "K": size, "NW": shape.warps, "KW": shape.team, "C": shape.chunks, "R": shape.rows, "S": shape.ring,
        "GROUP": getattr(linear, "group_size", INT4_PIECE), "GATED": int(gates), "NORM": int(gain is not None),
        "RESIDUAL": int(residual), "WIDE": int(wide), "ADDS": int(adds), "REHEARSES": int(REHEARSES),
    }  # fmt: skip
    properties: Any = torch.cuda.get_device_properties(weight.device)
    shared_bytes = shape.shared_bytes(kind, size)
    return RowKernel(
        function=compiled("one_row", tuple(names.items()), shared_bytes, weight.device),
        shape=shape,
        shared_bytes=shared_bytes,
        num_blocks=properties.multi_processor_count // 4 * 4,  # a team's blocks have the same place in tiles of scales
        weight=weight,
        scales=kernel_scales(linear, gates),
        bias=getattr(linear, "bias", None),
        gain=gain,
        width=weight.shape[0] // (2 if gates else 1),
        epsilon=epsilon,
        factor=factor,
    )


def inputs_of(linear: Any) -> int:
    """The number of inputs of a layer."""
    size: int = linear.weight.shape[1] * (2 if kind_of(linear) == INT4 else 1)
    return size


@functools.cache
def compiled(name: str, numbers: tuple[tuple[str, Any], ...], shared_bytes: int, device: torch.device) -> Any:
    """The function of a kernel on a device."""
    text = (SOURCES / ("one_row.cu" if name == "one_row" else "one_token_attention.cu")).read_text()
    source = "".join(f"#define {key} {value}\n" for key, value in numbers) + text
    return compile_kernel(source, name, shared_bytes=shared_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAttention:
    """Attention of one new token, from its projections."""

    function: Any
    num_splits: int
    num_kv_heads: int
    keys: Tensor
    values: Tensor
    tables: tuple[Tensor, Tensor]  # cosine and sine
    gains: tuple[Tensor | None, Tensor | None]  # of queries and keys
    scale: float
    epsilon: float

    def __call__(self, qkv: Tensor, inputs: StepInputs, out: Tensor) -> Tensor:
        places = inputs.positions_T, inputs.slots_T, inputs.block_tables_SB
        pointers = pointers_of(qkv, self.keys, self.values, *self.tables, *places, *self.gains, out)
        numbers = [ctypes.c_float(self.scale), ctypes.c_float(self.epsilon)]
        grid = self.num_splits, self.num_kv_heads
        launch_early(self.function, grid, 32 * ATTENTION_WARPS, 0, [*pointers, *numbers])
        return out


def token_attention(attention: Any, keys: Tensor, values: Tensor, model: Transformer) -> TokenAttention:
    arch = model.arch
    splits = num_splits(arch.num_kv_heads)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    names = {
        "NH": arch.num_heads, "NKV": arch.num_kv_heads, "HD": arch.head_size, "SPLITS": splits,
        "KVBLOCK": keys.shape[1], "WINDOW": attention.window or 0, "ROTATES": int(attention.is_rotated),
        "NORMALIZES": int(q_norm is not None), "NW": ATTENTION_WARPS, "REHEARSES": int(REHEARSES),
    }  # fmt: skip
    return TokenAttention(
        function=compiled("attend", tuple(names.items()), 0, keys.device),
        num_splits=splits,
        num_kv_heads=arch.num_kv_heads,
        keys=keys,
        values=values,
        tables=(model.rotation.cos, model.rotation.sin),
        gains=(None, None) if q_norm is None else (q_norm.weight, k_norm.weight),
        scale=attention.scale,
        epsilon=arch.norm_epsilon,
    )


def num_splits(num_kv_heads: int) -> int:
    """Blocks for one key-value head: a power of two."""
    splits = MAX_SPLITS
    while splits > 1 and splits * num_kv_heads > ATTENTION_BLOCKS:
        splits //= 2
    return splits


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayer:
    """The kernels of one layer."""

    project: RowKernel
    attend: TokenAttention
    add_attended: RowKernel
    mlp: tuple[RowKernel, RowKernel] | SparseLayer  # dense: gates, and the sum with the residual stream


class OneRowStep:
    """The kernels for one network and its cache."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        arch, body = model.arch, model.model
        self._embedding = body.embed_tokens.weight
        self._embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=self._embedding.dtype))
        self._logit_scale, self._vocab_size = arch.logit_scale, arch.vocab_size
        self._sizes = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size, arch.num_heads * arch.head_size
        self._mlp_size = arch.intermediate_size
        self._layers = [row_layer(model, cache, number) for number in range(arch.num_layers)]
        head = tied_head(body.embed_tokens) if model.lm_head is None else model.lm_head
        adds = is_sparse(body.layers[-1])
        self._head = row_kernel(head, gain=body.norm.weight, adds=adds, wide=True, **norm_options(model))

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [1, V] of a step of one token."""
        x = F.embedding(inputs.ids_T, self._embedding)
        x = x if self._embedding_scale == 1.0 else x * self._embedding_scale
        qkv, attended, gated = (x.new_empty(size) for size in (*self._sizes, self._mlp_size))
        counters = torch.zeros(len(self._layers), 4, dtype=torch.int32, device=x.device)  # of routers
        added: Tensor | None = None  # by experts
        for layer, counters_T in zip(self._layers, counters, strict=True):
            x = multiply_sum(layer.project, x, added, qkv)
            layer.attend(qkv, inputs, attended)
            layer.add_attended(attended, x)
            if isinstance(layer.mlp, tuple):
                gate, add_gated = layer.mlp
                add_gated(gate(x, gated), x)
                added = None
            else:
                x, added = layer.mlp(x, None, counters_T)
        logits = torch.empty(1, self._vocab_size, device=x.device)
        multiply_sum(self._head, x, added, logits)
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale


def multiply_sum(kernel: RowKernel, x: Tensor, added: Tensor | None, out: Tensor) -> Tensor:
    """The residual stream after `added` was added to it; its product is in `out`."""
    kept = x if added is None else torch.empty_like(x)
    kernel(x, out, added, None if added is None else kept)
    return kept


def norm_options(model: Transformer) -> dict[str, Any]:
    return {"epsilon": model.arch.norm_epsilon, "factor": model.arch.residual_scale}


def is_sparse(layer: Any) -> bool:
    return isinstance(layer.mlp, SparseMLP)


def row_layer(model: Transformer, cache: KVCache, number: int) -> RowLayer:
    layers: list[Any] = [*model.model.layers]
    layer, options = layers[number], norm_options(model)
    attention, mlp, mlp_gain = layer.self_attn, layer.mlp, layer.post_attention_layernorm.weight
    adds = number > 0 and is_sparse(layers[number - 1])
    if is_sparse(layer):
        kernels: Any = sparse_layer(mlp, mlp_gain, model)
    else:
        gate = row_kernel(mlp.gate_up_proj, gain=mlp_gain, gates=True, **options)
        kernels = gate, row_kernel(mlp.down_proj, residual=True, **options)
    return RowLayer(
        project=row_kernel(attention.qkv_proj, gain=layer.input_layernorm.weight, adds=adds, **options),
        attend=token_attention(attention, cache.keys[number], cache.values[number], model),
        add_attended=row_kernel(attention.o_proj, residual=True, **options),
        mlp=kernels,
    )


def sparse_layer(mlp: SparseMLP, gain: Tensor, model: Transformer) -> SparseLayer:
    from flambeau.llm.backends.cuda import network_layers, norm  # with Triton

    arch = model.arch
    parameters = norm.NormParameters(gain=gain, epsilon=arch.norm_epsilon, residual_scale=arch.residual_scale)
    return network_layers.sparse_layer(parameters, mlp)


def linear_layers(model: Transformer) -> list[tuple[Any, bool]]:
    """All linear layers but those of experts, and whether half of the outputs are gates."""
    found: list[tuple[Any, bool]] = []
    layers: list[Any] = [*model.model.layers]
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [(attention.qkv_proj, False), (attention.o_proj, False)]
        if not is_sparse(layer):
            found += [(mlp.gate_up_proj, True), (mlp.down_proj, False)]
    head = tied_head(model.model.embed_tokens) if model.lm_head is None else model.lm_head
    return [*found, (head, False)]


def fits(linear: Any, *, gates: bool) -> bool:
    """Whether the kernel can multiply a layer."""
    kind, weight = kind_of(linear), linear.weight
    if kind is None or inputs_of(linear) % 64 or len(weight) % (16 if kind == INT4 else 4):
        return False
    return row_shape(kind, inputs_of(linear)) is not None


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network that `CudaNetwork` supports."""
    arch, device = model.arch, cache.keys[0].device
    if torch.cuda.get_device_capability(device) != CAPABILITY or cache.keys[0].dtype != torch.bfloat16:
        return False
    if set(arch.extras) - TUNED:
        return False
    is_wide = arch.qk_norm and any(layer.self_attn.is_wide for layer in model.model.layers)  # type: ignore[union-attr]
    sparse: list[Any] = [layer for layer in model.model.layers if is_sparse(layer)]
    if any(layer.mlp.shared_expert is not None for layer in sparse):
        return False
    if is_wide or arch.head_size not in (64, 128):
        return False
    if arch.num_heads // arch.num_kv_heads > MAX_QUERIES or arch.vocab_size % 4:
        return False
    return all(fits(linear, gates=gates) for linear, gates in linear_layers(model))


def is_faster(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network that `CudaNetwork` supports, and are faster."""
    if set(model.arch.extras) - TUNED:  # first: such a network may have other layers
        return False
    has_experts = any(is_sparse(layer) for layer in model.model.layers)
    is_faster = is_measured_faster(model.arch.hidden_size, weight_kinds(model), has_experts=has_experts)
    return is_faster and can_compute(model, cache)


def weight_kinds(model: Transformer) -> set[int | None]:
    """The kinds of all layers' weights but the head's."""
    return {kind_of(linear) for linear, _ in linear_layers(model)[:-1]}


def is_measured_faster(hidden_size: int, kinds: set[int | None], *, has_experts: bool) -> bool:
    """On an H200, with 2,048 and 4,096: in wider networks launches matter less than the rate of the products."""
    return hidden_size <= MAX_SIZE and kinds <= {BFLOAT16, INT8, FP8} and not has_experts
