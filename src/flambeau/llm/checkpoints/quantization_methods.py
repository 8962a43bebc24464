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
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms, LayerFormat, UnpackedFiles
from flambeau.llm.checkpoints.mxfp4 import keep_mxfp4
from flambeau.llm.checkpoints.packed_weights import unpack
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
MXFP4 = "mxfp4"  # of experts, as those of gpt-oss


def unpack_weights(files: list[WeightFile], arch: Architecture, forms: KeptForms = NO_FORMS) -> UnpackedFiles:
    """Files whose weights were quantized elsewhere, in a form that the network can take; others stay as they are."""
    declared = arch.source.get("quantization_config") or {}
    method = declared.get("quant_method", "")
    if method == GGUF:
        return unpack_gguf(files, arch, forms)
    if method == MXFP4 and forms.blocks:
        return keep_mxfp4(files, arch, as_codes=forms.codes)
    if method not in METHODS:
        return UnpackedFiles(files)
    return unpack(in_single_experts(files), arch, METHODS[method](declared), forms)


def is_packed(arch: Architecture, forms: KeptForms = NO_FORMS) -> bool:
    """Whether the weights were quantized elsewhere; those in MXFP4 that are not kept are dequantized by their files."""
    method = (arch.source.get("quantization_config") or {}).get("quant_method")
    return method in (*METHODS, GGUF) or (method == MXFP4 and forms.blocks)


def has_packed_layers(files: list[WeightFile], arch: Architecture) -> bool:
    """Whether the tensors of some layer are packed, in files whose configuration says that they may be."""
    declared = arch.source.get("quantization_config") or {}
    markers = METHODS[declared["quant_method"]](declared).markers
    return any(stored.name.endswith(tuple(f".{end}" for end in markers)) for file in files for stored in file)


def as_unpacked(arch: Architecture, settings: QuantizationSettings | None) -> Architecture:
    """The architecture for unpacked files: its quantization is what is left of it."""
    declared = {} if settings is None else settings.to_config()
    return replace(arch, source={**arch.source, "quantization_config": declared})
