"""Shard: a rank's part of a network. Each has some of the heads and part of every feed-forward layer.

A network is divided while its checkpoint is read, so no rank holds more than its part. Ranks add up their sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flambeau.llm.errors import LLMError
from flambeau.llm.executor.rank_norms import share_groups, share_inner_norm, share_norms
from flambeau.llm.executor.rank_parts import MIXER_COLUMNS, check_sizes, local_recurrence, mixer_rows
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.compressed_attention import CompressedAttention
from flambeau.llm.models.decoder_layers import DecoderLayer
from flambeau.llm.models.families.layer_sizes import LayerSizes
from flambeau.llm.models.feed_forward import MixedMLP
from flambeau.llm.models.indexer import BlockIndexer
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.tensor_names import apart_name, of_its_layer
from flambeau.llm.models.transformer import Transformer

_ROWS = (
    "inner_norm",
    "gate_proj",
    "up_proj",
    "q_proj",
    "q_b_proj",
    "kv_b_proj",
    "o_a_proj",
)  # each rank has some of the outputs …
_COLUMNS = ("o_proj", "o_b_proj", "down_proj", *MIXER_COLUMNS)  # … and some of the inputs of the next layer
_KV_ROWS = ("k_proj", "v_proj")
_SCALES = ("scale", "scales", "minimums", "factors")


def local_architecture(arch: Architecture, size: int) -> Architecture:
    """The shape of one rank's part of a network."""
    check_sizes(arch, size)
    return replace(
        arch,
        num_heads=max(1, arch.num_heads // size),  # of a network without attention
        num_kv_heads=max(1, arch.num_kv_heads // size),
        intermediate_size=max(1, arch.intermediate_size // size),
        expert_size=arch.expert_size // size,
        shared_expert_size=arch.shared_expert_size // size,
        shapes=tuple(local_shape(shape, size) for shape in arch.shapes),
        compression=None if arch.compression is None else arch.compression.part(size),
        recurrence=None if arch.recurrence is None else local_recurrence(arch.recurrence, size),
    )


def local_shape(shape: LayerSizes, size: int) -> LayerSizes:
    """The sizes of one rank's part of a layer."""
    return replace(
        shape,
        num_heads=max(1, shape.num_heads // size),
        num_kv_heads=max(1, shape.num_kv_heads // size),
        intermediate_size=max(1, shape.intermediate_size // size),
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Cuts one rank's part out of a checkpoint's tensors, by their Hugging Face names."""

    arch: Architecture
    rank: int
    size: int

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of a tensor; all of it if every rank needs it."""
        name = apart_name(name)
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if self.arch.recurrence is not None and ".mixer." in name and leaf not in MIXER_COLUMNS:
            own = name.rpartition(".mixer.")[2].partition(".")[0]
            return mixer_rows(self.arch.recurrence, own, tensor, self.rank, self.size)
        if leaf == "position_scale":
            return tensor if ".indexer." in name else tensor.chunk(self.size, dim=0)[self.rank]
        is_head_norm = leaf in ("q_norm", "k_norm") and (tensor.dim() == 2 or self.arch.wide_qk_norm)
        if leaf in _ROWS or kind == "sinks" or (is_head_norm and leaf == "q_norm"):
            return tensor.chunk(self.size, dim=0)[self.rank]
        if leaf in _KV_ROWS or is_head_norm:
            return self._kv_rows(tensor, of_its_layer(self.arch, name).num_kv_heads)
        if leaf in _COLUMNS:
            if kind == "bias":  # added once, by rank 0; zeros on the meta device would import a compiler
                return tensor if self.rank == 0 or tensor.is_meta else torch.zeros_like(tensor)
            if kind in _SCALES:  # of quantized weights
                tensor = self._whole_groups(tensor)
            if tensor.dim() == 1:  # scales of whole rows
                return tensor
            if tensor.shape[1] % self.size:
                raise LLMError(
                    f"{module} has rows of {tensor.shape[1]} numbers or bytes, which {self.size} ranks cannot share "
                    "evenly; use a number of ranks that divides it, or one rank"
                )
            return tensor.chunk(self.size, dim=1)[self.rank]
        return tensor

    def _whole_groups(self, scales: Tensor) -> Tensor:
        """The scales [O, N, …] of smaller groups, if a border between ranks cuts a group; see `block_size_for`."""
        times = 1 if scales.dim() == 1 else self.size // math.gcd(self.size, scales.shape[1])
        return scales if times == 1 else scales.repeat_interleave(times, dim=1)

    def _kv_rows(self, tensor: Tensor, heads: int) -> Tensor:
        """The rows of this rank's key-value heads; with more ranks than heads, ranks share a head."""
        number = max(1, heads // self.size)
        first = self.rank * heads // self.size
        return tensor.view(heads, -1, *tensor.shape[1:])[first : first + number].flatten(0, 1)


class AllReduced(nn.Module):
    """A layer whose outputs are summed over all ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = self.inner(*inputs)
        dist.all_reduce(y)
        return y


def add_all_reduce(model: Transformer, shard: Shard) -> None:
    """Make a rank's part of a network compute what depends on the parts of the others, too."""
    for block in model.model.blocks or ():
        for name in ("o_proj", "down_proj"):
            block.add_module(name, AllReduced(getattr(block, name)))
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        parts = dict(layer.named_children())  # not every layer has all of them
        if "self_attn" in parts:
            join_attention(layer.self_attn, shard)
        if "mixer" in parts:
            join_mixer(parts["mixer"], shard)
        mlp = parts.get("mlp")
        if isinstance(mlp, MixedMLP):  # its norms need the sums
            mlp.add_module("down_proj", AllReduced(mlp.down_proj))
            mlp.add_module("sparse", AllReduced(mlp.sparse))
        elif mlp is not None:
            share_inner_norm(mlp, shard.rank, shard.size)
            layer.add_module("mlp", AllReduced(mlp))
        if "shortcut" in parts:
            sparse = parts["shortcut"]
            assert isinstance(sparse, SparseMLP)
            sparse.adds_inputs = sparse.adds_inputs and shard.rank == 0
            layer.add_module("shortcut", AllReduced(sparse))


def join_attention(attention: Attention | LatentAttention | CompressedAttention, shard: Shard) -> None:
    """Sum the outputs over all ranks; norms over all heads and the slopes of ALiBi depend on the others, too."""
    if isinstance(attention, CompressedAttention):
        attention.add_module("o_b_proj", AllReduced(attention.o_b_proj))
        return
    attention.add_module("o_proj", AllReduced(attention.o_proj))
    if not isinstance(attention, Attention):
        return
    if attention.is_wide and attention.q_norm is not None:
        share_norms(attention, shard.rank, shard.size)
    share_inner_norm(attention, shard.rank, shard.size)
    if isinstance(attention.indexer, BlockIndexer):
        first = shard.rank * shard.arch.num_kv_heads // shard.size
        choice = attention.indexer.choice
        attention.indexer.choice = choice._replace(num_heads=attention.num_kv_heads, first_head=first)
    if attention.alibi is not None:
        first = shard.rank * attention.num_heads
        attention.alibi = attention.alibi._replace(num_heads=shard.arch.num_heads, first_head=first)


def join_mixer(mixer: nn.Module, shard: Shard) -> None:
    """Sum what depends on all heads or channels of a recurrent layer over all ranks."""
    for name, layer in [*mixer.named_children()]:
        if name in MIXER_COLUMNS:
            mixer.add_module(name, AllReduced(layer))
    share_groups(mixer, shard.arch, shard.rank, shard.size)
    if isinstance(mixer, LightningAttention) and shard.arch.recurrence is not None:
        mixer.num_all_heads = shard.arch.recurrence.num_heads
        mixer.first_head = shard.rank * mixer.shape.num_heads
