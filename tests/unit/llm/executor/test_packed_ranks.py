"""Quantized weights stay quantized on several ranks, and give what the dequantized network of one rank gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flambeau.llm.backends.cpu.packed_experts import PackedStack, is_known
from flambeau.llm.backends.cpu.packed_linear import PackedLinear, packed
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.cpu_weights import packer
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.shard import Shard
from flambeau.llm.loader import load_engine
from flambeau.llm.quantize.coded import CodedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.sampling_params import SamplingParams
from support.checkpoints import write_checkpoint
from support.cpu_kernels import need_cpu_kernels
from support.packed_files import write_kind
from support.ranks import run_as_threads
from support.sharded import OPTIONS, generate_on_ranks, load_part
from support.tiny_models import ARCH
from support.weights import logits_of

FORMS = KeptForms(blocks=True, codes=True)
PROMPTS = [[*range(40, 56)], [9] * 20, [77]]

CASES = {
    ("GPTQ int4", "dense"): Int4Linear,
    ("GPTQ int4", "experts"): Int4Linear,
    ("AWQ int4", "dense"): Int4Linear,
    ("compressed-tensors int4", "experts"): Int4Linear,
    ("compressed-tensors int8", "experts"): Int8Linear,
    ("compressed-tensors fp8", "dense"): Fp8Linear,
    ("compressed-tensors fp8 blocks", "dense"): Fp8Linear,
    ("fp8, one scale", "dense"): Fp8Linear,
    ("fp8 blocks", "dense"): Fp8Linear,
    ("fp8 blocks", "experts"): Fp8Linear,
    ("fp8 blocks", "latent"): Fp8Linear,
    ("MXFP4", "gpt-oss"): nn.Linear,
    ("ModelOpt NVFP4", "dense"): CodedLinear,
    ("ModelOpt NVFP4", "experts"): CodedLinear,
    ("bitsandbytes nf4", "dense"): CodedLinear,
    ("bitsandbytes int8", "dense"): Int8Linear,
    ("torchao fp8", "dense"): Fp8Linear,
    ("own int8", "experts"): Int8Linear,
    ("own int4", "dense"): Int4Linear,
    ("own fp8", "experts"): Fp8Linear,
}


@pytest.mark.parametrize(("kind", "network"), CASES)
def test_ranks_find_with_quantized_weights_what_one_finds_with_whole_ones(kind, network, tmp_path, monkeypatch):
    folder = write_kind(tmp_path / "checkpoint", kind, network)
    expected = logits_of(load_model(folder, dtype=torch.float32))
    for size in (2, 4):
        parts = [load_part(folder, rank, size, forms=FORMS) for rank in range(size)]
        for found in run_as_threads(monkeypatch, lambda rank, parts=parts: logits_of(parts[rank]), size):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        layer: Any = parts[1].model.layers[1]
        assert type(layer.self_attn.o_proj.inner) is CASES[kind, network]
        mlp = layer.mlp.inner
        if network != "dense":
            assert isinstance(mlp.experts.gate_up_proj, ExpertStack)
            assert isinstance(mlp.experts.down_proj, ExpertStack)


EXACT = [case for case, layer in CASES.items() if layer not in (Int4Linear, Int8Linear)]  # with these kernels


@pytest.mark.parametrize(("kind", "network"), EXACT)
def test_the_cpu_kernels_compute_the_layers_of_a_rank(kind, network, tmp_path, monkeypatch):
    need_cpu_kernels()
    folder = write_kind(tmp_path / "checkpoint", kind, network)
    arch = read_architecture(folder, FORMS)
    expected = logits_of(load_model(folder, dtype=torch.float32))
    for size in (2, 4):
        arrived = packer(folder, arch, torch.float32, is_part=True)
        parts = [load_part(folder, rank, size, arrived=arrived, forms=FORMS) for rank in range(size)]
        for found in run_as_threads(monkeypatch, lambda rank, parts=parts: logits_of(parts[rank]), size):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        layer: Any = parts[1].model.layers[1]
        assert isinstance(layer.self_attn.o_proj.inner, PackedLinear)
        if network != "dense":
            assert isinstance(layer.mlp.inner.experts.down_proj, PackedStack)


def test_routers_of_a_rank_are_not_packed(tmp_path, monkeypatch):
    """Also where the experts are beside a later layer."""
    need_cpu_kernels()
    write_checkpoint(tmp_path, "longcat")
    expected = logits_of(load_model(tmp_path))
    arrived = packer(tmp_path, read_architecture(tmp_path), torch.float32, is_part=True)
    parts = [load_part(tmp_path, rank, arrived=arrived) for rank in range(2)]
    for found in run_as_threads(monkeypatch, lambda rank: logits_of(parts[rank])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_cpu_kernels_leave_small_groups_of_integers_to_pytorch():
    layer = Int4Linear(64, 32, group_size=8)
    assert packed(layer) is None
    assert not is_known(ExpertStack(layer, num_experts=1, dtype=torch.float32))
    model = nn.Sequential(layer)
    use_fast_layers(model, torch.float32)
    assert model[0] is layer


def test_scales_are_repeated_only_where_a_border_cuts_a_block(tmp_path):
    folder = write_kind(tmp_path / "checkpoint", "fp8 blocks", "dense")
    layer: Any = load_part(folder, 0, forms=FORMS).model.layers[0]
    assert layer.self_attn.o_proj.inner.scale.shape == (256, 1)  # of 128 inputs: a block
    assert layer.mlp.inner.down_proj.scale.shape == (256, 3)  # of 192 inputs: three halves of blocks
    assert layer.mlp.inner.gate_up_proj.scale.shape == (384, 2)


def test_inputs_that_ranks_cannot_share_are_refused():
    with pytest.raises(LLMError, match=r"o_proj has rows of 33 numbers or bytes, which 2 ranks cannot share"):
        Shard(ARCH, 1, 2)("model.layers.0.self_attn.o_proj.weight", torch.ones(8, 33))


@pytest.mark.parametrize(
    ("kind", "network", "compile"),
    [
        ("fp8 blocks", "latent", False),
        ("GPTQ int4", "experts", False),  # the CPU kernels round inputs
        ("MXFP4", "gpt-oss", True),
        ("bitsandbytes nf4", "dense", True),
    ],
)
def test_two_processes_generate_what_one_generates(kind, network, compile, tmp_path):
    if compile:
        need_cpu_kernels()
    folder = write_kind(tmp_path / "checkpoint", kind, network)
    engine = load_engine(folder, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
    assert generate_on_ranks(folder, PROMPTS, compile=compile).tokens == expected


def test_four_processes_have_groups_of_eight_where_a_border_cuts_those_of_32(tmp_path):
    folder = write_kind(tmp_path / "checkpoint", "MXFP4", "gpt-oss")
    engine = load_engine(folder, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
    assert generate_on_ranks(folder, PROMPTS, size=4).tokens == expected
    layer: Any = load_part(folder, 3, 4, forms=FORMS).model.layers[0]
    assert layer.mlp.inner.experts.down_proj.get_buffer("scales").shape == (4, 64, 3)  # of 24 inputs
