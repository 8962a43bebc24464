"""Quantized layers of GGUF files in our own layouts, from blocks of the types in gguf_blocks.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.checkpoints.gguf_blocks import BlockFormat, CodedForm, Decode, FactoredScales
from flambeau.llm.checkpoints.layer_formats import LazyTensor, PackedLayer
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.groups import FACTOR_SIZE
from flambeau.llm.quantize.int4 import pack_int4

BYTES_AT_ONCE = 1 << 20  # of blocks that are decoded
ReadBlocks = Callable[[Decode], Tensor]


def packed_layer(whole: LazyTensor, form: BlockFormat, read: ReadBlocks, *, narrow: bool = False) -> PackedLayer:
    """A quantized layer, or the layers of all experts, in our own layouts if these are exact.

    `narrow`: with the scales of the file, or codes.
    """
    if narrow:
        return narrow_layer(whole, form, read)
    shape, layout = whole.shape, form.layout
    grouped = torch.Size((*shape[:-1], shape[-1] // layout.size))

    def minimums() -> Tensor:
        return read(form.scales).mul_(-layout.middle) if form.minimums is None else read(form.minimums)

    scales = LazyTensor(grouped, torch.float32, lambda: read(form.scales))
    lowest = LazyTensor(grouped, torch.float32, minimums)
    levels = {"weight": LazyTensor(shape, torch.uint8, lambda: read(form.levels)), "scales": scales}
    levels |= {"minimums": lowest} if layout.has_minimums else {}
    if not layout.has_pairs:
        return PackedLayer(weight=whole, groups=layout, levels=levels)
    pairs = LazyTensor(
        torch.Size((*shape[:-1], shape[-1] // 2)),
        torch.uint8,
        lambda: read(lambda blocks: pack_int4(form.levels(blocks))),
    )
    own = {"weight": pairs, "scales": scales, "minimums": lowest}
    return PackedLayer(weight=whole, layout=("int4", layout.size), own=own, groups=layout, levels=levels)


def narrow_layer(whole: LazyTensor, form: BlockFormat, read: ReadBlocks) -> PackedLayer:
    """A layer in the form that GPU kernels read: scales take as many bits as in the file, but for those of codes."""
    if form.codes is not None:
        return coded_layer(whole, form, form.codes, read)
    shape, layout, factored = whole.shape, form.layout, isinstance(form.scales, FactoredScales)
    grouped = torch.Size((*shape[:-1], shape[-1] // layout.size))
    given = {"scales": form.scales} | ({} if form.minimums is None else {"minimums": form.minimums})
    levels = {"weight": LazyTensor(shape, torch.uint8, partial(read, form.levels))}
    factors: list[Decode] = []
    for leaf, scales in given.items():
        dtype, decode = torch.float16, scales
        if isinstance(scales, FactoredScales):
            dtype, decode = torch.int8, partial(integers_of, scales)
            factors.append(scales.factor)
        levels[leaf] = LazyTensor(grouped, dtype, partial(read_as, read, decode, dtype))
    if factors:
        of_factors = torch.Size((*shape[:-1], shape[-1] // FACTOR_SIZE, len(factors)))
        decode = partial(factors_of, factors)
        levels["factors"] = LazyTensor(of_factors, torch.float16, partial(read_as, read, decode, torch.float16))
    return PackedLayer(weight=whole, groups=replace(layout, scale_bits=8 if factored else 16), levels=levels)


def coded_layer(whole: LazyTensor, form: BlockFormat, codes: CodedForm, read: ReadBlocks) -> PackedLayer:
    """The codes of a table, the first of two in the lower half of a byte."""
    shape = whole.shape
    layout = CodeLayout(codes.table, form.layout.size, has_wide_scales=codes.has_wide_scales)
    dtype = torch.float32 if codes.has_wide_scales else torch.bfloat16
    grouped = torch.Size((*shape[:-1], shape[-1] // layout.size))

    def pairs(blocks: Tensor) -> Tensor:
        each = codes.codes(blocks)
        return each[:, ::2] | each[:, 1::2] << 4

    def scales() -> Tensor:
        return read(form.scales).mul_(codes.unit).to(dtype)

    levels = {
        "weight": LazyTensor(torch.Size((*shape[:-1], shape[-1] // 2)), torch.uint8, partial(read, pairs)),
        "scales": LazyTensor(grouped, dtype, scales),
    }
    return PackedLayer(weight=whole, groups=layout, levels=levels)


def integers_of(scales: FactoredScales, blocks: Tensor) -> Tensor:
    return scales.integers(blocks).flatten(1)


def factors_of(factors: list[Decode], blocks: Tensor) -> Tensor:
    """The factors of each block [R, F, K]: of scales, and of minimums if there are any."""
    return torch.stack([factor(blocks) for factor in factors], dim=2)


def read_as(read: ReadBlocks, decode: Decode, dtype: torch.dtype) -> Tensor:
    return read(decode).to(dtype)


def decoded(rows: np.ndarray[Any, np.dtype[Any]], form: BlockFormat, decode: Decode, order: Tensor | None) -> Tensor:
    """What blocks […, O, bytes of a row] hold […, O, …], some rows at a time; in this order of the rows."""
    flat = torch.from_numpy(rows.reshape(-1, rows.shape[-1]))
    at_once = max(1, BYTES_AT_ONCE // flat.shape[1])
    found = torch.empty(0)
    for start in range(0, len(flat), at_once):
        some = flat[start : start + at_once]
        value = decode(some.view(len(some), -1, form.num_bytes))
        if not start:
            found = torch.empty(len(flat), *value.shape[1:], dtype=value.dtype)
        found[start : start + at_once] = value
    return (found if order is None else found[order]).view(*rows.shape[:-2], -1, *found.shape[1:])
