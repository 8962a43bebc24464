"""The methods of quantization whose checkpoints are read, by the `quant_method` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flambeau.llm.checkpoints.bitsandbytes import bitsandbytes_format
from flambeau.llm.checkpoints.compressed_tensors import compressed_tensors_format
from flambeau.llm.checkpoints.expert_stacks import in_single_experts
from flambeau.llm.checkpoints.fp8 import fp8_format, modelopt_format
from flambeau.llm.checkpoints.gguf_weights import unpack_gguf
from flambeau.llm.checkpoints.gptq import auto_round_format, awq_format, gptq_format
from flambeau.llm.checkpoints.packed_weights import LayerFormat, UnpackedFiles, unpack
from flambeau.llm.checkpoints.torchao import torchao_format
from flambeau.llm.checkpoints.weight_files import WeightFile
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.quantize.settings import QuantizationSettings

METHODS: dict[str, Callable[[Mapping[str, Any]], LayerFormat]] = {
    "gptq": gptq_format,
    "awq": awq_format,
    "auto-round": auto_round_format,
    "compressed-tensors": compressed_tensors_format,
    "fp8": fp8_format,
    "fbgemm_fp8": fp8_format,
    "modelopt": modelopt_format,
    "bitsandbytes": bitsandbytes_format,
    "torchao": torchao_format,
}
GGUF = "gguf"  # of files that say it themselves


def unpack_weights(
    files: list[WeightFile],
    arch: Architecture,
    *,
    keeps_blocks: bool = False,
    keeps_codes: bool = False,
    keeps_groups: bool = False,
    narrow_groups: bool = False,
) -> UnpackedFiles:
    """Files whose weights were quantized elsewhere, in a form that the network can take; others stay as they are.

    With `keeps_groups`, integers of 4 to 8 bits in groups stay so, as the CPU kernels multiply them; with
    `narrow_groups`, as the GPU kernels do. With `keeps_blocks`, fp8 weights with several scales for a row do; with
    `keeps_codes`, 4 bits that index a table.
    """
    declared = arch.source.get("quantization_config") or {}
    if declared.get("quant_method") == GGUF:
        return unpack_gguf(files, arch, keeps_groups=keeps_groups, narrow_groups=narrow_groups)
    make = METHODS.get(declared.get("quant_method", ""))
    if make is None:
        return UnpackedFiles(files)
    files = in_single_experts(files)
    keeps = {"keeps_codes": keeps_codes, "keeps_groups": keeps_groups or narrow_groups}
    return unpack(files, arch, make(declared), keeps_blocks=keeps_blocks, **keeps)


def is_packed(arch: Architecture) -> bool:
    """Whether the weights were quantized elsewhere."""
    return (arch.source.get("quantization_config") or {}).get("quant_method") in (*METHODS, GGUF)


def is_mxfp4(arch: Architecture) -> bool:
    """Whether experts may be in MXFP4, as those of gpt-oss are."""
    return (arch.source.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def has_packed_layers(files: list[WeightFile], arch: Architecture) -> bool:
    """Whether the tensors of some layer are packed, in files whose configuration says that they may be."""
    declared = arch.source.get("quantization_config") or {}
    markers = METHODS[declared["quant_method"]](declared).markers
    return any(stored.name.endswith(tuple(f".{end}" for end in markers)) for file in files for stored in file)


def as_unpacked(arch: Architecture, settings: QuantizationSettings | None) -> Architecture:
    """The architecture for unpacked files: its quantization is what is left of it."""
    declared = {} if settings is None else settings.to_config()
    return replace(arch, source={**arch.source, "quantization_config": declared})
