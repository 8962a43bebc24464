"""GGUF files and integers of 8 bits in groups stay packed on several ranks, and give what transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.llm import network_loader
from flambeau.llm.backends.cpu.network import CpuNetwork
from flambeau.llm.backends.cpu.packed_experts import PackedStack
from flambeau.llm.backends.cpu.packed_linear import PackedLinear
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.gguf_blocks import FORMATS
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.parameter_filler import Arrived
from flambeau.llm.config import EngineConfig
from flambeau.llm.cpu_weights import can_keep_groups, packer
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.gpu_weights import can_keep_integers, join_equal_parts, order_codes
from flambeau.llm.loader import load_engine
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.coded import CodedLinear
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, CudaGroupedStack
from flambeau.llm.quantize.groups import GroupedLinear, JoinedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.sampling_params import SamplingParams
from support.checkpoints import reference
from support.cpu_kernels import need_cpu_kernels
from support.gguf_files import tensors_of, values_of, write_gguf
from support.llm_steps import room, step_inputs
from support.packed_checkpoints import write_packed
from support.packed_files import write_kind
from support.ranks import run_as_threads
from support.sharded import OPTIONS, generate_on_ranks, load_part
from support.weights import IDS, logits_of
from unit.llm.checkpoints import test_bytes_in_groups, test_compressed_tensors

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
EXPERT_SIZES = {"num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 256, "intermediate_size": 256}
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CPU, GPU = KeptForms(groups="cpu"), KeptForms(groups="gpu")
PROMPTS = [[*range(40, 56)], [9] * 20, [77]]
CODED = ("IQ4_NL", "IQ4_XS", "MXFP4")
PAIRS = ("Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0")

Kinds = str | Callable[[str], str]


def parts_of(path: Path, size: int, forms: KeptForms, arrived: Arrived | None = None) -> list[Transformer]:
    """What the loader makes of a file for each rank, in plain PyTorch if nothing else arrives."""
    arrived = order_codes(torch.float32, is_part=True) if forms is GPU else arrived
    parts = [load_part(path, rank, size, arrived=arrived, forms=forms) for rank in range(size)]
    for part in parts:
        join_equal_parts(part)
    return parts


def check_logits(parts: list[Transformer], expected: Tensor, monkeypatch: pytest.MonkeyPatch, **tolerance: Any) -> None:
    for found in run_as_threads(monkeypatch, lambda rank: logits_of(parts[rank]), len(parts)):
        torch.testing.assert_close(found, expected, **(tolerance or TOLERANCE))


def written(
    folder: Path, model: Any, architecture: str, kind: Kinds, values: dict[str, Any] | None = None
) -> tuple[Path, Tensor]:
    """A file, and the logits of transformers with the weights that it stands for."""

    def kind_of(name: str) -> str:
        return "F32" if name.endswith("mlp.gate.weight") else kind if isinstance(kind, str) else kind(name)

    path = folder / "gguf" / "model.gguf"
    header = values_of(model.config, **values or {})
    weights = write_gguf(path, architecture, tensors_of(model, architecture), header, kind_of)
    for name in [name for name in weights if name.endswith("experts.gate_proj.weight")]:
        start = name.removesuffix("gate_proj.weight")
        weights[f"{start}gate_up_proj"] = torch.cat(
            [weights.pop(f"{start}{one}_proj.weight") for one in ("gate", "up")], 1
        )
        weights[f"{start}down_proj"] = weights.pop(f"{start}down_proj.weight")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    with torch.inference_mode():
        return path, model(IDS.unsqueeze(0)).logits[0]


@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_keep_all_types_of_gguf_files(tmp_path, kind, monkeypatch):
    """Borders between ranks cut blocks of 256, but no group."""
    model = reference("qwen-2", **FOUR_HEADS, hidden_size=256, intermediate_size=768)
    path, expected = written(tmp_path, model, "qwen2", kind)
    for size, forms in ((2, CPU), (4, CPU), (2, GPU), (4, GPU)):
        parts = parts_of(path, size, forms)
        check_logits(parts, expected, monkeypatch)
        layer: Any = parts[1].model.layers[1]
        on_cpu = Int4Linear if kind in PAIRS else GroupedLinear
        for one in (layer.self_attn.qkv_proj, layer.self_attn.o_proj.inner, layer.mlp.inner.down_proj):
            assert type(one) is (on_cpu if forms is CPU else CodedLinear if kind in CODED else CudaGroupedLinear)
        assert layer.mlp.inner.down_proj.in_features == 768 // size
        assert isinstance(parts[1].model.embed_tokens, RowEmbedding)


def mixed(name: str) -> str:
    """The types of a file that is called Q4_K_M, and floats, in one module."""
    kinds = {"v_proj": "Q6_K", "1.self_attn.k_proj": "F16", "down_proj": "Q6_K", "embed": "Q6_K", "1.mlp.up": "Q8_0"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


@pytest.mark.parametrize("size", [2, 4])
def test_projections_of_a_module_have_types_of_their_own(size, tmp_path, monkeypatch):
    sizes = {**FOUR_HEADS, "hidden_size": 256, "intermediate_size": 768}
    model = reference("qwen-2", **sizes, tie_word_embeddings=True)  # with biases
    path, expected = written(tmp_path, model, "qwen2", mixed)
    parts = parts_of(path, size, CPU)
    check_logits(parts, expected, monkeypatch)
    first, second = parts[1].model.layers[:2]
    assert [type(part) for part in first.self_attn.qkv_proj.parts] == [Int4Linear, Int4Linear, GroupedLinear]
    assert [type(part) for part in second.self_attn.qkv_proj.parts] == [Int4Linear, nn.Linear, GroupedLinear]
    assert [type(part) for part in second.mlp.inner.gate_up_proj.parts] == [Int4Linear, GroupedLinear]
    parts = parts_of(path, size, GPU)
    check_logits(parts, expected, monkeypatch)
    first = parts[1].model.layers[0]
    assert [type(part) for part in first.self_attn.qkv_proj.parts] == [CudaGroupedLinear] * 2  # keys beside queries


EXPERT_KINDS = ("Q4_K", "Q6_K", "Q5_1", "Q8_0", "IQ4_XS", "MXFP4", mixed)


@pytest.mark.parametrize("kind", EXPERT_KINDS, ids=lambda kind: kind if isinstance(kind, str) else "mixed")
def test_experts_stay_packed(kind, tmp_path, monkeypatch):
    model = reference("qwen-3-moe-normalized", **EXPERT_SIZES, **FOUR_HEADS)
    path, expected = written(tmp_path, model, "qwen3moe", kind, EXPERTS)
    for size, forms in ((2, CPU), (4, CPU), (2, GPU), (4, GPU)):
        parts = parts_of(path, size, forms)
        check_logits(parts, expected, monkeypatch)
        experts: Any = parts[1].model.layers[0].mlp.inner.experts
        for stack in (experts.gate_up_proj, experts.down_proj):
            is_ordered = forms is GPU and kind not in CODED
            assert type(stack) is (CudaGroupedStack if is_ordered else ExpertStack)
        assert experts.down_proj[0].shape == (256, 256 // size)


CUT = {"Q8_0": 16, "Q4_0": 16, "Q5_1": 16, "IQ4_NL": 16}


@pytest.mark.parametrize(("kind", "intermediate", "size"), [*((kind, 352, 2) for kind in CUT), ("Q5_0", 288, 8)])
def test_groups_are_smaller_where_a_border_cuts_one(kind, intermediate, size, tmp_path, monkeypatch):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
    model = reference("qwen-2", **sizes, intermediate_size=intermediate)
    path, expected = written(tmp_path, model, "qwen2", kind)
    for forms in (CPU, GPU):
        parts = parts_of(path, size, forms)
        check_logits(parts, expected, monkeypatch)
        down = parts[1].model.layers[0].mlp.inner.down_proj
        group_size = down.in_features // down.get_buffer("scales").shape[1]
        assert group_size == (CUT[kind] if size == 2 else 4)
    # Too few for a byte of the bits above four: a level stays in a byte.
    assert type(down) is (GroupedLinear if size == 8 else CodedLinear if kind in CODED else CudaGroupedLinear)


@pytest.mark.parametrize("name", test_bytes_in_groups.FILES)
def test_integers_of_8_bits_stay(name, tmp_path, monkeypatch):
    write, layout = test_bytes_in_groups.FILES[name]
    packed, plain = write(tmp_path)
    expected = logits_of(load_model(plain, dtype=torch.float32))
    for size, forms in ((2, CPU), (4, CPU), (2, GPU), (4, GPU)):
        parts = parts_of(packed, size, forms)
        check_logits(parts, expected, monkeypatch)
        layer: Any = parts[1].model.layers[1]
        for one in (layer.self_attn.qkv_proj, layer.mlp.inner.down_proj):
            assert type(one) is (GroupedLinear if forms is CPU else CudaGroupedLinear)
        assert layer.mlp.inner.down_proj.layout.size == min(layout.size, 256 // size)


def test_projections_of_4_and_8_bits_are_in_one_module(tmp_path, monkeypatch):
    pairs = [
        write_packed(
            tmp_path / str(bits),
            test_compressed_tensors.packed(32, bits, symmetric=False),
            test_compressed_tensors.config("pack-quantized", test_bytes_in_groups.INT8),
        )
        for bits in (4, 8)
    ]
    packed, plain = test_bytes_in_groups.mix(*pairs, tmp_path)
    parts = parts_of(packed, 2, CPU)
    check_logits(parts, logits_of(load_model(plain, dtype=torch.float32)), monkeypatch)
    qkv = parts[1].model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv, JoinedLinear)
    assert [type(part) for part in qkv.parts] == [Int4Linear, Int4Linear, GroupedLinear]


# ---- on the CPU kernels, which round scales, and inputs to 8 bits in groups ----


@pytest.mark.parametrize("network", ["dense", "experts", "cut"])
def test_the_cpu_kernels_compute_the_layers_of_a_rank(network, tmp_path, monkeypatch):
    need_cpu_kernels()
    if network == "experts":
        model = reference("qwen-3-moe-normalized", **EXPERT_SIZES, **FOUR_HEADS)
        path, _ = written(tmp_path, model, "qwen3moe", mixed, EXPERTS)
    else:
        intermediate, kind = (768, mixed) if network == "dense" else (288, "Q8_0")
        model = reference("qwen-2", **FOUR_HEADS, hidden_size=256, intermediate_size=intermediate)
        path, _ = written(tmp_path, model, "qwen2", kind)
    arch = read_architecture(path, CPU)
    whole: Any = load_model(path, dtype=torch.float32, arrived=packer(path, arch, torch.float32), forms=CPU)
    expected = logits_of(whole)
    with torch.inference_mode():
        step = CpuNetwork(whole, room(whole, 1)).run(step_inputs({0: (0, IDS.tolist())}), torch.arange(len(IDS)))
    assert (step - expected).norm() < 0.05 * expected.norm()
    for size in (2, 4):
        arrived = packer(path, arch, torch.float32, is_part=True)
        parts: list[Any] = parts_of(path, size, CPU, arrived)
        # A sum in another order may round an input to another step, which tokens after it see.
        for found in run_as_threads(monkeypatch, lambda rank, parts=parts: logits_of(parts[rank]), size):
            assert (found - expected).norm() < 0.05 * expected.norm()
        is_known = network != "cut" or size == 2  # else groups of 8
        for layer, *others in zip(whole.model.layers, *(part.model.layers for part in parts), strict=True):
            check_sums(layer.self_attn.o_proj, [other.self_attn.o_proj.inner for other in others])
            if network == "experts":
                stacks = [other.mlp.inner.experts.down_proj for other in others]
                assert [type(stack) for stack in stacks] == [PackedStack] * size
                assert type(others[0].mlp.inner.experts.gate_up_proj) is PackedStack
                check_sums(layer.mlp.experts.down_proj.rows, [stack.rows for stack in stacks])
            else:
                downs = [other.mlp.inner.down_proj for other in others]
                assert [type(down) for down in downs] == [PackedLinear if is_known else GroupedLinear] * size
                check_sums(layer.mlp.down_proj, downs, rounds_alike=network != "cut")


def check_sums(whole: Any, parts: list[Any], *, rounds_alike: bool = True) -> None:
    """The parts of a layer have its weights, and the sum of their outputs is its output."""
    weights = torch.cat([part.dequantize(torch.float32) for part in parts], dim=1)
    torch.testing.assert_close(weights, whole.dequantize(torch.float32), rtol=0.0 if rounds_alike else 0.01, atol=0.0)
    if not rounds_alike:  # in smaller groups
        return
    x = torch.randn(7, whole.in_features, generator=torch.Generator().manual_seed(1))
    found = sum(part(some) for part, some in zip(parts, x.chunk(len(parts), dim=1), strict=True))
    torch.testing.assert_close(found, whole(x), rtol=1e-5, atol=1e-5)


def test_two_processes_generate_what_one_generates(tmp_path):
    folder = write_kind(tmp_path / "checkpoint", "GGUF Q8_0", "experts")
    engine = load_engine(folder, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
    assert generate_on_ranks(folder, PROMPTS).tokens == expected


def test_the_loader_keeps_them_on_every_rank(tmp_path, monkeypatch):
    folder = write_kind(tmp_path / "checkpoint", "GGUF Q4_K_M", "experts", moe_intermediate_size=512)
    cpu, gpu, ranks = torch.device("cpu"), torch.device("cuda"), TensorParallelGroup(1, 2, None)  # type: ignore[arg-type]
    monkeypatch.setattr(network_loader, "minimum_of_ranks", lambda number, ranks: number)
    config = EngineConfig(device="cpu", num_blocks=8, max_num_seqs=2, tensor_parallel_size=2)
    arch = read_architecture(folder)
    assert can_keep_groups(replace(config, compile=False), cpu, ranks)
    assert not can_keep_groups(config, gpu, ranks)
    assert can_keep_integers(config, gpu, ranks, arch)  # in plain PyTorch: any GPU
    assert not can_keep_integers(config, cpu, ranks, arch)
    for changes in ({"quantization": "int8"}, {"merge_lora": True}):
        assert not can_keep_groups(replace(config, **changes), cpu, ranks)
        assert not can_keep_integers(replace(config, **changes), gpu, ranks, arch)
    need_cpu_kernels()
    part: Any = network_loader.load_network(folder, config, cpu, ranks).backend.model
    assert [type(one) for one in part.model.layers[0].self_attn.qkv_proj.parts] == [PackedLinear] * 3
    assert isinstance(part.model.layers[1].mlp.inner.experts.down_proj, PackedStack)
    assert isinstance(part.model.embed_tokens.rows, PackedLinear)
