"""The tensors of GGUF files: their numbers, and the order of their rows."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.checkpoints.gguf_recurrent import recurrent_rows, recurrent_shape
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, GgufTensor

FLOATS = {0: (torch.float32, np.float32), 1: (torch.float16, np.float16), 30: (torch.bfloat16, np.uint16)}
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
ROTATED_PARTS = ("attn_q", "attn_k", "attn_qkv")


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


def num_bytes(tensor: GgufTensor, path: Path) -> int:
    if tensor.kind in FLOATS:
        return prod(tensor.shape) * FLOATS[tensor.kind][0].itemsize
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[quantization_type(tensor, path)]
    return prod(tensor.shape) // block * size


def slices_of(tensor: GgufTensor, path: Path) -> tuple[GgufTensor, ...]:
    """The layers of a stack, by names that files do not have."""
    start, size = tensor.name.removesuffix("weight"), num_bytes(tensor, path) // tensor.shape[0]
    return tuple(
        replace(tensor, name=f"{start}{i}.weight", shape=tensor.shape[1:], offset=tensor.offset + i * size)
        for i in range(tensor.shape[0])
    )


def shape_of(name: str, tensor: GgufTensor) -> torch.Size:
    is_gate = name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1
    return torch.Size((1, *tensor.shape) if is_gate else recurrent_shape(name, tensor))


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
