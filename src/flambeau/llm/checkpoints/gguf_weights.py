"""The weights of GGUF files, by the names that Llama's have elsewhere.

Integers of the types in gguf_blocks.py are kept for the kernels of CPUs and GPUs; elsewhere, those of 4 bits in groups
of 32 (Q4_0, Q4_1, Q4_K) are read into our own layout, exactly. The gguf package dequantizes what is not kept.

Shapes: O outputs · I inputs · H heads · R latent · K key and V value sizes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flambeau.llm.checkpoints.gguf_blocks import FORMATS
from flambeau.llm.checkpoints.gguf_layers import decoded, packed_layer
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
    recurrent_values,
)
from flambeau.llm.checkpoints.gguf_tensors import (
    FLOATS,
    quantization_type,
    raw_rows,
    read_tensor,
    row_order,
    shape_of,
    slices_of,
)
from flambeau.llm.checkpoints.group_choice import ROW_TABLES, choose_groups
from flambeau.llm.checkpoints.layer_formats import KeptForms, LazyTensor, PackedLayer, UnpackedFile, UnpackedFiles
from flambeau.llm.checkpoints.layout_choice import choose_layout
from flambeau.llm.checkpoints.packed_weights import describe, describe_groups
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, GgufTensor, gguf_parts, gguf_path, read_header, read_model_header
from flambeau.llm.models.architecture import Architecture

STACKS = ("altup_proj.weight", "altup_unembd_proj.weight")  # of layers that we have one by one


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

    def _has_own_form(self, tensor: GgufTensor) -> bool:
        """Whether a tensor has its columns in another order than ours, or further factors."""
        return column_order(tensor, self._header) is not None or tensor.name in self._factors

    def packed_layers(self, *, narrow: bool = False) -> Iterator[tuple[str, PackedLayer]]:
        """The quantized linear layers, embeddings and stacks of experts; `narrow`: as the GPU kernels read them."""
        for name, tensor in self._tensors.items():
            if tensor.kind not in FLOATS and len(tensor.shape) in (2, 3):
                yield name, self._packed_layer(name, tensor, narrow=narrow)

    def _packed_layer(self, name: str, tensor: GgufTensor, *, narrow: bool) -> PackedLayer:
        """One of them; dequantized if its blocks are of no known type, or are arranged otherwise than ours."""
        whole = LazyTensor(shape_of(name, tensor), torch.float32, partial(self.read, name))
        form, order = FORMATS.get(quantization_type(tensor, self.path).name), row_order(tensor, self._header)
        if form is None or self._has_own_form(tensor):
            return PackedLayer(weight=whole)
        return packed_layer(
            whole, form, lambda decode: decoded(raw_rows(self.path, tensor), form, decode, order), narrow=narrow
        )


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


def unpack_gguf(files: list[WeightFile], arch: Architecture, forms: KeptForms) -> UnpackedFiles:
    """The files with integers in groups as they are, or with those of 4 bits in our own layout, in whole modules.

    The GPU kernels read them with the scales of the files, or as codes.
    """
    gguf_files = [file for file in files if isinstance(file, GgufFile)]
    for_gpu = forms.groups == "gpu"
    found = {name: layer for file in gguf_files for name, layer in file.packed_layers(narrow=for_gpu)}
    if not found:
        return UnpackedFiles(files)
    if forms.groups is not None:
        tensors = {stored.name: stored for file in files for stored in file}
        choice = choose_groups(arch, found, tensors, whole_experts=for_gpu)
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
