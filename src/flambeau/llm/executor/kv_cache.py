"""KVCache: the keys and values of every layer, in blocks.

Where keys and values are computed from latents (MLA), the cache holds these as keys, and no values. A contiguous
cache is one whose blocks are as long as a sequence: there is no second kind. In a cache of int8, the D numbers of a
head are followed by their scale, a float32 in four bytes.

Shapes: L layers · P blocks · K tokens of a block · G key-value heads · D head size · T tokens
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flambeau.llm.executor.huge_pages import zeros_in_huge_pages
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.models.architecture import Architecture


class KVCache:
    """Tensors [P, K, G, D] of keys and of values for each layer; of latents there are no values.

    Block 0 is for padding and belongs to no sequence. With int8 they are [P, K, G, D + 4]: see `to_int8`. Recurrent
    layers have a state for each of `num_slots` sequences instead, and `num_spare` for proposed tokens.
    """

    def __init__(
        self,
        arch: Architecture,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_slots: int = 0,
        num_spare: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.head_size = num_blocks, block_size, arch.head_size
        self.states = StateCache(arch, num_slots, num_spare, device=device)
        own = [arch.of_layer(layer) for layer in range(arch.num_layers)]
        shapes = [
            # Recurrent layers have no keys and values; others read those of another layer.
            (num_blocks if number in arch.caching_layers else 0, block_size, one.num_kv_heads)
            for number, one in enumerate(own)
        ]
        self.keys = [
            zeros((*shape, key_room(one, dtype)), device, dtype) for shape, one in zip(shapes, own, strict=True)
        ]
        self.is_latent = arch.keys_are_values
        self.values = [
            zeros((*shape, size_in(dtype, one.output_size)), device, dtype)
            for shape, one in zip(shapes, own, strict=True)
            if not self.is_latent
        ]
        sizes = {layer: arch.index_size(layer) for layer in range(arch.num_layers)}
        self.index_keys = {  # of indexers, which choose what is attended to
            layer: zeros((num_blocks, block_size, 1, size_in(dtype, size)), device, dtype)
            for layer, size in sizes.items()
            if size
        }
        self.entries: dict[int, Tensor] = {}  # keys that stand for several tokens, in the blocks of the last of them
        self.index_entries: dict[int, Tensor] = {}  # what indexers compare
        for layer, of_block, size, index_size in entry_sizes(arch, block_size):
            self.entries[layer] = zeros((num_blocks, of_block, 1, size_in(dtype, size)), device, dtype)
            if index_size:
                shape = num_blocks, of_block, 1, size_in(dtype, index_size)
                self.index_entries[layer] = zeros(shape, device, dtype)
        self.of_head: KVCache | None = None  # in the same blocks: what a head keeps, which prefixes are shared with

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that a block holds; the first dimension of each tensor is the block."""
        more = *self.index_keys.values(), *self.entries.values(), *self.index_entries.values()
        own = [tensor for tensor in (*self.keys, *self.values, *more) if len(tensor)]
        return own if self.of_head is None else own + self.of_head.tensors

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store keys and values; a slot is block times block size plus offset."""
        store(self.keys[layer], slots_T, k_TGD)
        if not self.is_latent:
            store(self.values[layer], slots_T, v_TGD)


def entry_sizes(arch: Architecture, block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Layers with compressed entries: how many a block has, and the numbers of one for attention and for an indexer."""
    shape = arch.compression
    for layer in sorted(shape.compressing_layers) if shape is not None else ():
        assert shape is not None
        index_size = shape.index_size if layer in shape.overlapping_layers else 0
        yield layer, shape.entries_of_block(layer, block_size), arch.head_size, index_size


def store(cached: Tensor, slots_T: Tensor, new_TGD: Tensor) -> None:
    """Write numbers to their slots of [P, K, G, D]; those that a narrow type cannot hold become its largest."""
    if cached.dtype == torch.int8:
        cached.flatten(0, 1).index_copy_(0, slots_T, to_int8(new_TGD))
        return
    if cached.dtype.itemsize > 1:
        cached.flatten(0, 1).index_copy_(0, slots_T, new_TGD.to(cached.dtype))
        return
    limit = torch.finfo(cached.dtype).max
    bits_TGD = new_TGD.clamp(-limit, limit).to(cached.dtype).view(torch.uint8)
    cached.view(torch.uint8).flatten(0, 1).index_copy_(0, slots_T, bits_TGD)  # not every device indexes float8


def load(cached: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The contents of these blocks […, K, G, D] in another type."""
    if cached.dtype == torch.int8:
        return from_int8(cached[blocks], dtype)
    if cached.dtype.itemsize > 1:
        return cached[blocks].to(dtype)
    return cached.view(torch.uint8)[blocks].view(cached.dtype).to(dtype)


SCALE_BYTES = 4
INT8_MAX = 127


def key_room(arch: Architecture, dtype: torch.dtype) -> int:
    """How many numbers of the cache's type the key of a head takes."""
    return size_in(dtype, arch.head_size)


def head_room(arch: Architecture, dtype: torch.dtype) -> int:
    """How many numbers of the cache's type the key and the value of a head take; some keys are values."""
    return key_room(arch, dtype) + (0 if arch.keys_are_values else size_in(dtype, arch.output_size))


def size_in(dtype: torch.dtype, size: int) -> int:
    """How many numbers of the cache's type so many take, with their scale."""
    return size + (SCALE_BYTES if dtype == torch.int8 else 0)


def to_int8(x: Tensor) -> Tensor:
    """Numbers […, D] as [..., D + 4]: the largest number of a head is 127 steps, and the scale follows."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 1e-30, wide * (INT8_MAX / largest), 0.0).round()
    return torch.cat((steps.to(torch.int8), (largest / INT8_MAX).view(torch.int8)), dim=-1)


def from_int8(cached: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers […, D] of what is cached."""
    scale = cached[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (cached[..., :-SCALE_BYTES].float() * scale).to(dtype)


def zeros(shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the device."""
    if torch.device(device).type == "cpu":
        # A new sequence gets the lowest blocks: in huge pages, its first token would touch 2 MB in every tensor.
        return zeros_in_huge_pages(shape, dtype, first_is_small=True)
    return torch.zeros(shape, device=device, dtype=dtype)


def block_bytes(arch: Architecture, block_size: int, dtype: torch.dtype) -> int:
    """The size of one block in all layers."""
    own = [arch.of_layer(layer) for layer in arch.caching_layers]
    num_numbers = sum(one.num_kv_heads * head_room(one, dtype) for one in own)
    num_numbers += sum(size_in(dtype, size) for size in map(arch.index_size, range(arch.num_layers)) if size)
    of_entries = sum(
        of_block * sum(size_in(dtype, size) for size in sizes if size)
        for _, of_block, *sizes in entry_sizes(arch, block_size)
    )
    return (num_numbers * block_size + of_entries) * dtype.itemsize
