"""Weights that are quantized on load on several ranks: each rounds its part, and that is all that it rounds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.llm import network_loader
from flambeau.llm.backends.cpu.packed_linear import PackedLinear
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.config import EngineConfig, Quantization
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.quantize.int4 import dequantize_groups, quantize_int4
from flambeau.llm.quantize.quantizer import quantize_on_load
from flambeau.llm.quantize.row_scaled import dequantize_rows, quantize_fp8, quantize_int8
from support.cpu_kernels import need_cpu_kernels
from support.packed_files import write_kind
from support.ranks import run_as_threads
from support.sharded import load_part
from support.weights import logits_of

KINDS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
NOT_ROUNDED = ("embed_tokens", "lm_head", "norm", ".mlp.gate.", "kv_b_proj")
OF_INPUTS = ("o_proj", "down_proj")  # of which each rank has some


def rounded(weight: Tensor, kind: Quantization) -> Tensor:
    wide = weight.float()
    if kind == "int4":
        return dequantize_groups(*quantize_int4(wide, math.gcd(64, wide.shape[1])), dtype=torch.float32)
    return dequantize_rows(*(quantize_int8 if kind == "int8" else quantize_fp8)(wide), dtype=torch.float32)


def write_twin(folder: Path, original: Path, kind: Quantization, size: int) -> Path:
    """The same checkpoint with the numbers that the rounded parts stand for."""
    tensors = {}
    for file in original.glob("*.safetensors"):
        tensors |= load_file(file)
    for name, weight in tensors.items():
        if weight.dim() != 2 or any(part in name for part in NOT_ROUNDED):
            continue
        is_cut = any(part in name for part in OF_INPUTS)
        parts = weight.chunk(size, dim=1) if is_cut else (weight,)
        tensors[name] = torch.cat([rounded(part, kind) for part in parts], dim=1)
    folder.mkdir()
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    return folder


@pytest.mark.parametrize("network", ["dense", "tied", "experts", "latent"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_find_what_plain_pytorch_finds_with_the_rounded_weights(kind, network, tmp_path, monkeypatch):
    folder = write_kind(tmp_path / "original", "float32", network)
    arch = read_architecture(folder)
    for size in (2, 4):
        expected = logits_of(load_model(write_twin(tmp_path / f"{size}", folder, kind, size), dtype=torch.float32))
        parts: list[Any] = [load_part(folder, rank, size, arrived=quantize_on_load(kind, arch)) for rank in range(size)]
        for found in run_as_threads(monkeypatch, lambda rank, parts=parts: logits_of(parts[rank]), size):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not isinstance(parts[1].model.layers[1].self_attn.o_proj.inner, torch.nn.Linear)


@pytest.mark.parametrize("network", ["dense", "tied", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_kernels_compute_the_rounded_layers_of_a_rank(kind, network, tmp_path, monkeypatch):
    need_cpu_kernels()
    folder = write_kind(tmp_path / "original", "bfloat16", network)
    monkeypatch.setattr(network_loader, "minimum_of_ranks", lambda number, ranks: number)
    for size in (2, 4):
        expected = logits_of(load_model(write_twin(tmp_path / f"{size}", folder, kind, size), dtype=torch.float32))
        config = EngineConfig(device="cpu", num_blocks=8, max_num_seqs=2, quantization=kind, tensor_parallel_size=size)
        parts: list[Any] = [
            network_loader.load_network(
                folder, config, torch.device("cpu"), TensorParallelGroup(rank, size, None)
            ).backend.model  # type: ignore[arg-type]
            for rank in range(size)
        ]
        allowed = 1e-4 if kind == "fp8" else 0.03  # for integers, inputs are rounded to 8 bits
        for found in run_as_threads(monkeypatch, lambda rank, parts=parts: logits_of(parts[rank]), size):
            assert (found - expected).norm() < allowed * expected.norm()
        assert isinstance(parts[1].model.layers[1].self_attn.o_proj.inner, PackedLinear)
        assert parts[1].model.embed_tokens.weight.dtype == torch.bfloat16
        assert parts[1].lm_head.kind == "bfloat16"
