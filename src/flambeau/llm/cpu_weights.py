"""How the weights of a network are kept on a CPU: quantized, packed for the kernels, or as the files have them.

Layers are packed one by one while they are read where that is possible, so that a network is in memory once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from flambeau.llm.backends.cpu.bindings import kernels
from flambeau.llm.backends.cpu.network import PACKED_FLOAT32_BYTES, QUANTIZED_LAYERS, has_known_heads, unknown_parts
from flambeau.llm.backends.cpu.packed_experts import has_whole_panels, is_known, pack_experts_of, packed_stack
from flambeau.llm.backends.cpu.packed_linear import (
    INT8_GROUP,
    ROUTER,
    TRIM_BYTES,
    pack_floats,
    pack_layers,
    pack_quantized,
    packed,
    quantized_for_kernels,
)
from flambeau.llm.checkpoints.checkpoint import embedding, open_files
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.mapped_files import trim_heap
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.embeddings import NarrowEmbedding
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.coded import CodedLinear
from flambeau.llm.quantize.groups import GroupedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import ExpertStack, LayerMakers, grouped_layer, quantized_layer
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.quantize.settings import read_quantization

PACKED_AT_ONCE_BYTES = 2 << 30  # of files: about a second


def layer_makers(config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None) -> LayerMakers:
    """How layers are quantized on load: in the groups of the CPU kernels, and in their order where these are ready."""
    plain = LayerMakers(quantized_layer, quantized_layer)
    if device.type != "cpu" or not config.compile or ranks is not None or config.quantization is None:
        return plain
    grouped = partial(grouped_layer, int8_group_size=INT8_GROUP)
    if kernels.load(builds=False):
        return LayerMakers(quantized_for_kernels, grouped)
    return LayerMakers(grouped, grouped) if kernels.can_load() else plain


def can_keep_blocks(config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None) -> bool:
    """Whether fp8 weights with a scale for each block stay as they are, if nothing is to be made of them.

    They do on a CPU, and with several ranks, which need not be fast: their network may fit in no other way.
    """
    is_known = device.type == "cpu" or ranks is not None
    return is_known and config.quantization in (None, "fp8") and not config.merge_lora


def can_keep_codes(config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None) -> bool:
    """Whether codes of 4 bits stay: with several ranks, else as integers in groups, which need the CPU kernels."""
    if ranks is not None:
        return config.quantization is None and not config.merge_lora
    return can_keep_groups(config, device, ranks)


def can_keep_groups(config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None) -> bool:
    """Whether integers in groups stay as files have them: only the CPU kernels multiply such weights fast.

    Ranks need not be fast; on a GPU they keep them as `can_keep_integers` says.
    """
    if device.type != "cpu" or config.quantization is not None or config.merge_lora:
        return False
    return ranks is not None or (config.compile and kernels.can_load())


def packs_on_load(
    path: Path,
    config: EngineConfig,
    arch: Architecture,
    device: torch.device,
    ranks: TensorParallelGroup | None,
    dtype: torch.dtype,
) -> bool:
    """Whether layers are packed for the CPU kernels before the first step.

    That of a large network would come late: plain PyTorch computes while it is packed, with weights that are mapped
    from the files. Weights that are quantized, or narrower than the network's, would have to be copied anyway.
    """
    if device.type != "cpu" or not config.compile:
        return False
    if read_quantization(arch.source) is not None:
        return kernels.load(builds=False)
    if ranks is None and not has_whole_step(arch):
        return False
    files = open_files(path)
    is_copied = dtype == torch.float32 and embedding(files, arch.renames).dtype in (torch.bfloat16, torch.float16)
    return (is_copied or weight_file_bytes(path) <= PACKED_AT_ONCE_BYTES) and kernels.load(builds=False)


def has_whole_step(arch: Architecture) -> bool:
    """Whether the CPU kernels compute whole steps of such a network."""
    return not unknown_parts(arch) and has_known_heads(arch)


def packer(
    path: Path, arch: Architecture, dtype: torch.dtype, *, is_part: bool = False
) -> Callable[[str, nn.Module], nn.Module | None]:
    """For `load_model(arrived=…)`: packs each linear layer, and all experts of a layer, as soon as they are loaded.

    Of a network that the kernels do not compute as a whole, they compute the quantized layers and the last one. Of a
    rank's part, they compute all layers, one by one.
    """
    packs_float32 = weight_file_bytes(path) <= PACKED_FLOAT32_BYTES
    quantization, is_whole = read_quantization(arch.source), has_whole_step(arch) and not is_part
    has_integers = quantization is not None and quantization.kind in ("int8", "int4") and not quantization.table
    packs_experts = is_whole and has_whole_panels(arch)
    freed_bytes = 0

    def arrived(name: str, module: nn.Module) -> nn.Module | None:
        nonlocal freed_bytes
        freed_bytes += sum(tensor.nbytes for tensor in module.state_dict().values())
        if freed_bytes > TRIM_BYTES:  # of modules before this one
            freed_bytes = 0
            trim_heap()
        return packed_module(name, module)

    def packed_module(name: str, module: nn.Module) -> nn.Module | None:
        has_stacks = any(isinstance(child, ExpertStack) for child in module.children())  # which arrive by themselves
        if (packs_experts or is_part) and isinstance(module, Experts) and not has_stacks:
            pack_experts_of(module, packs_float32=packs_float32, dtype=dtype)
        is_apart = isinstance(module, ExpertStack) and (is_part or module.layout is not None) and is_known(module)
        if isinstance(module, ExpertStack) and (packs_experts or is_apart):
            return packed_stack(module, packs_float32=packs_float32)
        if type(module) in QUANTIZED_LAYERS:
            return packed(module)
        packs_floats = is_whole or is_part or name == "lm_head"
        if type(module) is not nn.Linear or name.endswith(ROUTER) or not packs_floats:
            return None
        if is_whole and has_integers and name == "lm_head":
            return pack_quantized(module.weight, "int8", INT8_GROUP, module.bias)
        return pack_floats(module.weight, module.bias, packs_float32=packs_float32, dtype=dtype)

    return arrived


def packs_last_layer(config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None) -> bool:
    """Whether the last layer of a rank's part is packed for the CPU kernels, whatever the others are."""
    return ranks is not None and device.type == "cpu" and config.compile and kernels.load(builds=False)


def pack_last_layer(model: Transformer, dtype: torch.dtype) -> None:
    """Pack the last layer of a rank's part; of tied embeddings in 16 bits, a copy.

    PyTorch would widen them in each step. They stay mapped from their file, for the inputs.
    """
    embeddings, head = model.model.embed_tokens, model.lm_head
    if head is None and isinstance(embeddings, NarrowEmbedding):
        model.lm_head = pack_floats(embeddings.weight, dtype=embeddings.dtype)
    elif type(head) is nn.Linear:
        model.lm_head = pack_floats(head.weight, head.bias, packs_float32=False, dtype=dtype) or head


def weight_file_bytes(path: Path) -> int:
    return sum(file.path.stat().st_size for file in open_files(path))


def use_faster_layers(
    model: nn.Module, config: EngineConfig, device: torch.device, dtype: torch.dtype, *, is_part: bool = False
) -> None:
    """Replace quantized layers by those of the CPU kernels, else, or until these are built, by PyTorch's.

    A rank's part of a network has no GPU kernels.
    """
    kinds = (Int8Linear, Int4Linear, GroupedLinear, Fp8Linear, CodedLinear)
    wants_kernels = device.type == "cpu" and config.compile and any(isinstance(m, kinds) for m in model.modules())
    if wants_kernels and kernels.load(builds=False):
        pack_layers(model, kinds)
    waits = wants_kernels and kernels.can_load() and not is_part  # a rank's layers are packed while they are loaded
    use_fast_layers(model, dtype, keeps_plain=waits, has_gpu_kernels=not is_part)
