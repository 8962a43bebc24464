"""Layers from packed integers and from 4-bit floating point numbers.

Shapes: I inputs · O outputs · N groups of inputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flambeau.llm.checkpoints.layer_formats import LazyTensor, PackedLayer, Parts
from flambeau.llm.checkpoints.mxfp4 import fp4_as_fp8
from flambeau.llm.checkpoints.weight_files import StoredTensor
from flambeau.llm.errors import CheckpointError
from flambeau.llm.quantize.coded import FP4, CodeLayout
from flambeau.llm.quantize.groups import GroupLayout
from flambeau.llm.quantize.int4 import GROUP_SIZES, pack_int4
from flambeau.llm.quantize.row_scaled import FP8

ReadTensor = Callable[[], Tensor]

# ---- integers in groups ----


def integer_layer(
    shape: torch.Size,
    group_size: int,
    bits: int,
    *,
    levels: ReadTensor,
    scales: ReadTensor,
    zeros: ReadTensor | None = None,
    order: Tensor | None = None,
    words: ReadTensor | None = None,
) -> PackedLayer:
    """A layer of weights `scale · (level - zero)`, with scales and zeros [O, N] of groups of inputs.

    Without zeros, the zero is the middle of the levels. `order` has the group of each input, if groups are not
    consecutive inputs. `words` has the levels of 4 bits as 32-bit words [O, I/8], which saves unpacking them.
    """
    out_features, in_features = shape
    middle = 1 << (bits - 1)
    if bits == 8 and zeros is not None and bool((zeros() == middle).all()):
        zeros = None

    def weight() -> Tensor:
        groups = torch.arange(in_features) // group_size if order is None else order
        steps_OI = levels().to(torch.int16) - (middle if zeros is None else zeros().to(torch.int16)[:, groups])
        return steps_OI.float().mul_(scales().float()[:, groups])

    whole = LazyTensor(shape, torch.float32, weight)
    if bits == 8 and order is None:
        whole_layer = eight_bit_layer(
            whole,
            group_size,
            levels=lambda: levels().to(torch.uint8),
            scales=lambda: scales().float(),
            zeros=None if zeros is None else lambda: zeros().float(),
        )
        if zeros is not None or group_size != in_features:
            return whole_layer
        own = {
            "weight": LazyTensor(shape, torch.int8, lambda: (levels().to(torch.int16) - middle).to(torch.int8)),
            "scale": LazyTensor(torch.Size((out_features,)), torch.float32, lambda: scales().float().flatten()),
        }
        return replace(whole_layer, layout=("int8", 0), own=own)
    if bits != 4 or order is not None:
        return PackedLayer(weight=whole)
    return four_bit_layer(
        whole,
        group_size,
        pairs=lambda: pack_int4(levels().to(torch.uint8)) if words is None else swap_halves(words().view(torch.uint8)),
        scales=lambda: scales().float(),
        minimums=lambda: -scales().float() * (middle if zeros is None else zeros().float()),
    )


def four_bit_layer(
    whole: LazyTensor, group_size: int, *, pairs: ReadTensor, scales: ReadTensor, minimums: ReadTensor
) -> PackedLayer:
    """A layer of pairs of 4-bit levels [O, I/2], with scales and minimums [O, N] of groups; else dequantized."""
    out_features, in_features = whole.shape
    size = own_group_size(group_size, in_features)
    if size is None:
        return PackedLayer(weight=whole)
    num_groups = in_features // size
    grouped = torch.Size((out_features, num_groups))
    own = {
        "weight": LazyTensor(torch.Size((out_features, in_features // 2)), torch.uint8, pairs),
        "scales": LazyTensor(grouped, torch.float32, lambda: repeat_groups(scales(), num_groups)),
        "minimums": LazyTensor(grouped, torch.float32, lambda: repeat_groups(minimums(), num_groups)),
    }
    return PackedLayer(weight=whole, layout=("int4", size), own=own, groups=GroupLayout(4, size, True))


def eight_bit_layer(
    whole: LazyTensor, group_size: int, *, levels: ReadTensor, scales: ReadTensor, zeros: ReadTensor | None
) -> PackedLayer:
    """A layer of 8-bit levels, which kernels multiply with scales and zeros [O, N] of groups; else dequantized."""
    out_features, in_features = whole.shape
    size = own_group_size(group_size, in_features)
    if size is None:
        return PackedLayer(weight=whole)
    num_groups = in_features // size
    grouped = torch.Size((out_features, num_groups))

    def minimums() -> Tensor:
        assert zeros is not None
        return repeat_groups(-scales() * zeros(), num_groups)

    parts = {
        "weight": LazyTensor(whole.shape, torch.uint8, levels),
        "scales": LazyTensor(grouped, torch.float32, lambda: repeat_groups(scales(), num_groups)),
    }
    parts |= {} if zeros is None else {"minimums": LazyTensor(grouped, torch.float32, minimums)}
    return PackedLayer(weight=whole, groups=GroupLayout(8, size, zeros is not None), levels=parts)


def swap_halves(pairs: Tensor) -> Tensor:
    """Pairs of 4 bits with the other one in the upper half."""
    return pairs >> 4 | pairs << 4


def own_group_size(group_size: int, in_features: int) -> int | None:
    """The largest group of ours that divides groups of this size; None: there is none."""
    if in_features % group_size:
        return None
    return next((size for size in sorted(GROUP_SIZES, reverse=True) if group_size % size == 0), None)


def repeat_groups(values_ON: Tensor, num_groups: int) -> Tensor:
    """Values of larger groups for each of the smaller groups that these contain."""
    return values_ON.repeat_interleave(num_groups // values_ON.shape[1], dim=1)


def unpack_words(words: Tensor, bits: int, size: int) -> Tensor:
    """Unsigned numbers […, size] of 2 to 8 bits from 32-bit words […, W], the lowest bits first."""
    if 8 % bits == 0:  # the bytes of a word are in the same order as its bits
        octets = words.contiguous().view(torch.uint8)
        values = torch.stack([(octets >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)
        return values.flatten(-2)[..., :size]
    values = torch.empty(*words.shape[:-1], size, dtype=torch.uint8)
    wide = words.long() & 0xFFFFFFFF
    for i in range(min(32, size)):  # 32 numbers fill `bits` words; a number may lie in two of them
        first, shift = divmod(bits * i, 32)
        part = wide[..., first::bits] >> shift
        if shift + bits > 32:
            part = part | (wide[..., first + 1 :: bits] << (32 - shift))
        values[..., i::32] = (part & ((1 << bits) - 1))[..., : -(-(size - i) // 32)].to(torch.uint8)
    return values


# ---- 4-bit floating point numbers ----


def fp4_layer(packed: StoredTensor, scale: ReadTensor, num_groups: int, *, has_wide_scales: bool = True) -> PackedLayer:
    """A layer of pairs of numbers [O, I/2], the first in the lower half, and the scales [O, N] of their groups.

    Our layout of it is codes, or fp8, which represents the numbers; the CPU kernels store them in 4 bits again.
    """
    shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
    unchanged = packed if packed.dtype == torch.uint8 else None

    def read_pairs() -> Tensor:
        return packed.read().view(torch.uint8)

    def weight() -> Tensor:
        table = torch.tensor(FP4)
        pairs = read_pairs()
        numbers = table[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).int()]
        return (numbers.view(len(pairs), num_groups, -1) * scale().float().unsqueeze(2)).flatten(1)

    own = {
        "weight": LazyTensor(shape, FP8, lambda: fp4_as_fp8(read_pairs())),
        "scale": LazyTensor(torch.Size((shape[0], num_groups)), torch.float32, lambda: scale().float()),
    }
    size, scale_dtype = shape[1] // num_groups, torch.float32 if has_wide_scales else torch.bfloat16
    coded = {
        "weight": LazyTensor(packed.shape, torch.uint8, read_pairs, stored=unchanged),
        "scales": LazyTensor(torch.Size((shape[0], num_groups)), scale_dtype, lambda: scale().to(scale_dtype)),
    }
    whole = LazyTensor(shape, torch.float32, weight)
    codes = CodeLayout(FP4, size, has_wide_scales=has_wide_scales)
    return PackedLayer(weight=whole, layout=("fp8", size), own=own, codes=codes, coded=coded)


# ---- errors ----


def require(parts: Parts, name: str, leaves: Sequence[str]) -> None:
    """Raise if a layer lacks one of these tensors."""
    missing = [leaf for leaf in leaves if leaf not in parts]
    if missing:
        raise CheckpointError(f"{name} is quantized, but no file has its {', '.join(missing)}; download it again")


def ill_formed(name: str, parts: Parts) -> CheckpointError:
    """The error for tensors whose shapes or types do not belong together."""
    found = ", ".join(f"{leaf} {list(part.shape)} {str(part.dtype)[6:]}" for leaf, part in sorted(parts.items()))
    return CheckpointError(f"the quantized weights of {name} do not fit together: {found}")
