"""The weights of GGUF files, by the names that Llama's have elsewhere.

Integers of the types in gguf_blocks.py are kept for the kernels of CPUs and GPUs; elsewhere, those of 4 bits in groups
of 32 (Q4_0, Q4_1, Q4_K) are read into our own layout, exactly. The gguf package dequantizes what is not kept.

Shapes: O outputs · I inputs · H heads · R latent · K key and V value sizes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.checkpoints.gguf_blocks import FORMATS, BlockFormat, CodedForm, Decode, FactoredScales
from flambeau.llm.checkpoints.gguf_names import (
    LATENT_KEYS,
    LATENT_VALUES,
    factored_name,
    is_unused,
    latent_name,
    own_name,
)
from flambeau.llm.checkpoints.gguf_recurrent import (
    column_order,
    parts_of,
    recurrent_rows,
    recurrent_shape,
    recurrent_values,
)
from flambeau.llm.checkpoints.packed_weights import (
    ROW_TABLES,
    LazyTensor,
    PackedLayer,
    UnpackedFile,
    UnpackedFiles,
    choose_groups,
    choose_layout,
    describe,
    describe_groups,
)
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, GgufTensor, gguf_parts, gguf_path, read_header, read_model_header
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.quantize.coded import CodeLayout
from flambeau.llm.quantize.groups import FACTOR_SIZE
from flambeau.llm.quantize.int4 import pack_int4

FLOATS = {0: (torch.float32, np.float32), 1: (torch.float16, np.float16), 30: (torch.bfloat16, np.uint16)}
BYTES_AT_ONCE = 1 << 20  # of blocks that are decoded
ROTATED_BY_PAIRS = (
    "llama",
    "granite",
    "granitemoe",
    "smollm3",
    "granitehybrid",
    "mistral3",
    "minicpm",
    "arcee",
    "olmo",
    "internlm2",
    "baichuan",
    "xverse",
    "deci",
    "bailingmoe",
    "deepseek",
)  # rows of queries and keys are arranged otherwise than elsewhere
STACKS = ("altup_proj.weight", "altup_unembd_proj.weight")  # of layers that we have one by one
ROTATED_PARTS = ("attn_q", "attn_k", "attn_qkv")


class GgufFile:
    """A GGUF file; `header` is that of the first one if there are several.

    Layers that predict further tokens are left out unless `has_further`.
    """

    def __init__(
        self, path: Path, header: GgufHeader, places: Mapping[str, Path] | None = None, *, has_further: bool = False
    ) -> None:
        self.path, self._header, self._places = path, header, places or {}
        tensors = read_header(path).tensors.values()
        self._factors = {weights: name for name in header.tensors if (weights := factored_name(name, header))}
        factors = {*self._factors.values()}
        used = [one for one in tensors if one.name not in factors and not is_unused(one.name, header, has_further)]
        self._latents = {latent_name(one.name): one for one in used if one.name.endswith(LATENT_KEYS)}
        self._tensors = {
            own_name(part.name, header): part
            for one in used
            if not one.name.endswith((LATENT_KEYS, LATENT_VALUES))
            for part in (slices_of(one, path) if one.name in STACKS else parts_of(one, header))
        }

    def __iter__(self) -> Iterator[StoredTensor]:
        """The tensors in the order of the file."""
        for name, tensor in self._tensors.items():
            yield StoredTensor(self, name, shape_of(name, tensor), FLOATS.get(tensor.kind, FLOATS[0])[0])
        for name, keys in self._latents.items():
            _, values = self._latent_values(keys)
            heads, latent, size = keys.shape
            yield StoredTensor(self, name, torch.Size((heads * (size + values.shape[1]), latent)), torch.float32)

    def _latent_values(self, keys: GgufTensor) -> tuple[Path, GgufTensor]:
        """The weights that make values beside those that make keys; they may be in the next part of a model."""
        name = keys.name.removesuffix(LATENT_KEYS) + LATENT_VALUES
        path = self._places.get(name, self.path)
        tensor = read_header(path).tensors.get(name)
        if tensor is None or len(keys.shape) != 3 or len(tensor.shape) != 3:
            raise CheckpointError(f"{self.path} has {keys.name} without a fitting {name}; download it again")
        return path, tensor

    def _read_latent(self, keys: GgufTensor) -> Tensor:
        """Keys and values of each head, one after the other."""
        path, values = self._latent_values(keys)
        keys_HRK, values_HVR = self._widened(self.path, keys).float(), self._widened(path, values).float()
        return torch.cat((keys_HRK.transpose(1, 2), values_HVR), dim=1).flatten(0, 1)

    def _widened(self, path: Path, tensor: GgufTensor) -> Tensor:
        """The numbers of a tensor, multiplied with its factors if it has any."""
        value, name = read_tensor(path, tensor), self._factors.get(tensor.name)
        if name is None:
            return value
        place = self._places.get(name, self.path)
        factors = read_tensor(place, read_header(place).tensors[name]).flatten()
        if len(factors) not in (1, *value.shape[:1]):
            raise CheckpointError(
                f"{self.path} has {len(factors)} factors of {tensor.name} in {name}; download it again"
            )
        return value * factors.view(-1, *(1 for _ in value.shape[1:]))

    def read(self, name: str) -> Tensor:
        """A tensor, dequantized if it is quantized, with rows in the usual order."""
        if name in self._latents:
            return self._read_latent(self._latents[name])
        tensor = self._tensors[name]
        value = self._widened(self.path, tensor)
        order = row_order(tensor, self._header)
        value = value if order is None else value[order]
        return recurrent_values(tensor, value, self._header).view(shape_of(name, tensor))

    def has_own_form(self, tensor: GgufTensor) -> bool:
        """Whether a tensor has its columns in another order than ours, or further factors."""
        return column_order(tensor, self._header) is not None or tensor.name in self._factors

    def packed_layers(self, *, narrow: bool = False) -> Iterator[tuple[str, PackedLayer]]:
        """The quantized linear layers, embeddings and stacks of experts; `narrow`: as the GPU kernels read them."""
        for name, tensor in self._tensors.items():
            if tensor.kind not in FLOATS and len(tensor.shape) in (2, 3):
                yield name, packed_layer(self, name, tensor, row_order(tensor, self._header), narrow=narrow)


class ActivationValues:
    """What the header of Apertus says of the activation of each layer, as the tensors that others have for it."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._values: dict[str, Tensor] = {}
        for leaf in ("alpha_p", "alpha_n", "beta", "eps"):
            key, count = f"xielu.{leaf}", header.get("block_count")
            given = header.values.get(key)
            numbers = given if isinstance(given, list) else [given] * count
            if len(numbers) != count or not all(isinstance(number, float) for number in numbers):
                raise CheckpointError(
                    f"{self.path} has {key} {given!r}, which must be a number for each of {count} layers"
                )
            for layer, number in enumerate(numbers):
                value = torch.tensor([number] if leaf.startswith("alpha") else number)
                self._values[f"model.layers.{layer}.mlp.{leaf}"] = value

    def __iter__(self) -> Iterator[StoredTensor]:
        for name, value in self._values.items():
            yield StoredTensor(self, name, value.shape, value.dtype)

    def read(self, name: str) -> Tensor:
        return self._values[name]


def open_gguf(path: Path, *, has_further: bool = False) -> list[WeightFile]:
    """The GGUF files of a path: one, or the parts of one model; with layers that predict further tokens, or not."""
    first = gguf_path(path)
    if first is None:
        raise CheckpointError(f"{path} is no GGUF file")
    header, parts = read_model_header(first), gguf_parts(first)
    places = {name: part for part in parts for name in read_header(part).tensors} if len(parts) > 1 else {}
    files: list[WeightFile] = [GgufFile(part, header, places, has_further=has_further) for part in parts]
    return [*files, ActivationValues(header)] if header.architecture == "apertus" else files


def unpack_gguf(
    files: list[WeightFile], arch: Architecture, *, keeps_groups: bool, narrow_groups: bool = False
) -> UnpackedFiles:
    """The files with integers in groups as they are, or with those of 4 bits in our own layout, in whole modules.

    With `narrow_groups`, they are kept as the GPU kernels read them: with the scales of the files, or codes.
    """
    gguf_files = [file for file in files if isinstance(file, GgufFile)]
    found = {name: layer for file in gguf_files for name, layer in file.packed_layers(narrow=narrow_groups)}
    if not found:
        return UnpackedFiles(files)
    if keeps_groups or narrow_groups:
        tensors = {stored.name: stored for file in files for stored in file}
        choice = choose_groups(arch, found, tensors, whole_experts=narrow_groups)
        kept_files: list[WeightFile] = [UnpackedFile(file, choice.replaced) for file in files]
        message = describe_groups("GGUF", choice)
        return UnpackedFiles(kept_files, choice.settings, message, is_smaller=len(choice.kept) == len(found))
    layers = {
        name.removesuffix(".weight"): layer
        for name, layer in found.items()
        if len(layer.weight.shape) == 2 and name.removesuffix(".weight") not in ROW_TABLES
    }
    settings, kept = choose_layout(arch, layers)
    replaced: dict[str, Mapping[str, LazyTensor]] = {
        f"{name}.weight": {f"{name}.{leaf}": value for leaf, value in layers[name].own.items()} for name in kept
    }
    opened: list[WeightFile] = [UnpackedFile(file, replaced) for file in files]
    num_stacks = sum(len(layer.weight.shape) == 3 for layer in found.values())
    remark = f"{num_stacks} stacks of experts are dequantized too" if num_stacks else ""
    message = describe("GGUF", layers, kept, settings, remark)
    return UnpackedFiles(opened, settings, message, is_smaller=len(kept) == len(layers) and not num_stacks)


# ---- rows ----


def shape_of(name: str, tensor: GgufTensor) -> torch.Size:
    is_gate = name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1
    return torch.Size((1, *tensor.shape) if is_gate else recurrent_shape(name, tensor))


def slices_of(tensor: GgufTensor, path: Path) -> tuple[GgufTensor, ...]:
    """The layers of a stack, by names that files do not have."""
    start, size = tensor.name.removesuffix("weight"), num_bytes(tensor, path) // tensor.shape[0]
    return tuple(
        replace(tensor, name=f"{start}{i}.weight", shape=tensor.shape[1:], offset=tensor.offset + i * size)
        for i in range(tensor.shape[0])
    )


def num_bytes(tensor: GgufTensor, path: Path) -> int:
    if tensor.kind in FLOATS:
        return prod(tensor.shape) * FLOATS[tensor.kind][0].itemsize
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[quantization_type(tensor, path)]
    return prod(tensor.shape) // block * size


def row_order(tensor: GgufTensor, header: GgufHeader) -> Tensor | None:
    """Where the rows of a tensor are in the file, which may have others too; None: in their order."""
    part = next((part for part in ROTATED_PARTS if f".{part}." in tensor.name), None)
    if part is None or header.architecture not in ROTATED_BY_PAIRS:
        return recurrent_rows(tensor, header)
    layer = int(tensor.name.split(".")[1])
    heads = num_heads(header, "attention.head_count", layer)
    kv_heads = num_heads(header, "attention.head_count_kv", layer) or heads
    counts = {"attn_q": (heads,), "attn_k": (kv_heads,), "attn_qkv": (heads, kv_heads, kv_heads)}[part]
    if not sum(counts) or tensor.shape[0] % (2 * sum(counts)):
        raise CheckpointError(f"{tensor.name} in {header.path} has {tensor.shape[0]} rows for {sum(counts)} heads")
    rows = torch.arange(tensor.shape[0]).view(sum(counts), -1)
    rotated, values = torch.split(rows, [sum(counts[:2]), sum(counts[2:])])
    return torch.cat((torch.cat((rotated[:, ::2], rotated[:, 1::2]), dim=1).flatten(), values.flatten()))


def num_heads(header: GgufHeader, key: str, layer: int) -> int:
    """A number of heads, which may be given for each layer: 0 for those without attention."""
    count = header.get(key) or 0
    return int(count[layer]) if isinstance(count, list) else int(count)


# ---- numbers ----


def quantization_type(tensor: GgufTensor, path: Path) -> Any:
    """The package's type of a quantized tensor."""
    try:
        from gguf import GGMLQuantizationType
    except ImportError as error:
        raise CheckpointError(f"{path} needs the package gguf: pip install 'flambeau[llm]'") from error
    try:
        return GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise CheckpointError(f"{tensor.name} in {path} has the type {tensor.kind}, which is not known") from None


def raw_rows(path: Path, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[Any]]:
    """The bytes of a quantized tensor […, O, bytes of a row], mapped from the file."""
    from gguf import GGML_QUANT_SIZES

    kind = quantization_type(tensor, path)
    block, size = GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise CheckpointError(f"rows of {tensor.name} in {path} do not divide into blocks of {block} ({kind.name})")
    return mapped(path, tensor, np.uint8, (*tensor.shape[:-1], tensor.shape[-1] // block * size))


def mapped(path: Path, tensor: GgufTensor, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    try:
        return np.memmap(path, dtype=dtype, mode="c", offset=tensor.offset, shape=shape)  # torch wants it writable
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is cut off or damaged ({tensor.name}: {error}); download it again") from error


def read_tensor(path: Path, tensor: GgufTensor) -> Tensor:
    """The numbers of a tensor; quantized ones as float32."""
    if tensor.kind in FLOATS:
        dtype, stored = FLOATS[tensor.kind]
        return torch.from_numpy(mapped(path, tensor, stored, tensor.shape)).view(dtype)
    from gguf import dequantize

    kind = quantization_type(tensor, path)
    try:
        return torch.from_numpy(dequantize(raw_rows(path, tensor), kind)).view(tensor.shape)
    except NotImplementedError:
        raise CheckpointError(f"{tensor.name} in {path} has the type {kind.name}, which is not supported") from None


def packed_layer(
    file: GgufFile, name: str, tensor: GgufTensor, order: Tensor | None, *, narrow: bool = False
) -> PackedLayer:
    """A quantized layer, or the layers of all experts, in our own layouts if these are exact.

    `narrow`: with the scales of the file, or codes.
    """
    shape = shape_of(name, tensor)
    whole = LazyTensor(shape, torch.float32, partial(file.read, name))
    form = FORMATS.get(quantization_type(tensor, file.path).name)
    if form is None or file.has_own_form(tensor):
        return PackedLayer(weight=whole)
    layout = form.layout
    grouped = torch.Size((*shape[:-1], shape[-1] // layout.size))

    def read(decode: Decode) -> Tensor:
        return decoded(raw_rows(file.path, tensor), form, decode, order)

    if narrow:
        return narrow_layer(whole, form, read)

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


ReadBlocks = Callable[[Decode], Tensor]


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
