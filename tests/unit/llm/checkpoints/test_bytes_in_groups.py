"""Integers of 8 bits in groups, or with zeros, of any tool stay as they are where kernels multiply them."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.backends.cpu.packed_linear import packed as packed_for_kernels
from flambeau.llm.backends.cpu.packed_linear import rounded_inputs
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.gpu_weights import order_codes
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from support.cpu_kernels import need_cpu_kernels
from support.packed_checkpoints import check_equal, to_words, write_packed
from unit.llm.checkpoints import test_compressed_tensors, test_gguf, test_gptq, test_torchao

INT8 = {**test_compressed_tensors.INT8, "strategy": "group", "group_size": 32}


def words(group_size, *, symmetric):
    pack = test_compressed_tensors.packed(group_size, 8, symmetric=symmetric)
    return lambda folder: write_packed(folder, pack, test_compressed_tensors.config("pack-quantized", INT8))


def int8_with_zeros(folder):
    pack = test_compressed_tensors.eight_bits(torch.int8, zero=True)
    return write_packed(folder, pack, test_compressed_tensors.config("int-quantized", INT8))


def gptq(group_size):
    pack = test_gptq.gptq(group_size, 8)
    return lambda folder: write_packed(folder, pack, test_gptq.config(bits=8, group_size=group_size))


def symmetric_gptq(folder):
    """As with `sym: true`: the zeros are in the middle of the levels."""

    def pack(weight):
        scales = weight.unflatten(1, (-1, 32)).abs().amax(2) / 127
        wide = scales.repeat_interleave(32, 1)
        levels = (weight / wide).round().long() + 128
        parts = {
            "qweight": to_words(levels, 8).t(),
            "qzeros": to_words(torch.full((scales.shape[1], len(weight)), 127), 8),
            "scales": scales.t(),
            "g_idx": (torch.arange(weight.shape[1]) // 32).to(torch.int32),
        }
        return parts, wide * (levels - 128)

    return write_packed(folder, pack, test_gptq.config(bits=8, sym=True))


def torchao(folder):
    """Small integers, whose zeros are 0."""
    pack = partial(test_torchao.integers, middle=0)
    return test_torchao.write(folder, pack, "IntxUnpackedToInt8Tensor")


FILES = {  # writers, and the layouts that layers have
    "compressed-tensors, groups": (words(32, symmetric=True), GroupLayout(8, 32)),
    "compressed-tensors, groups with zeros": (words(64, symmetric=False), GroupLayout(8, 64, True)),
    "compressed-tensors, rows with zeros": (int8_with_zeros, GroupLayout(8, 128, True)),
    "GPTQ": (gptq(32), GroupLayout(8, 32, True)),
    "GPTQ, symmetric": (symmetric_gptq, GroupLayout(8, 32)),
    "GPTQ, rows": (gptq(-1), GroupLayout(8, 128, True)),
    "torchao": (torchao, GroupLayout(8, 32)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_they_stay(tmp_path, name, on_gpu, caplog):
    write, layout = FILES[name]
    forms, arrived = KeptForms(groups="gpu" if on_gpu else "cpu"), order_codes(torch.float32) if on_gpu else None
    folders = write(tmp_path)
    with caplog.at_level(logging.INFO):
        model = check_equal(*folders, forms=forms, arrived=arrived)
    plain = load_model(folders[1], dtype=torch.float32)
    assert "14 tensors stay int8" in caplog.text
    assert "dequantized" not in caplog.text
    for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        layer, expected = (each.get_submodule(f"model.layers.1.{leaf}") for each in (model, plain))
        assert type(layer) is (CudaGroupedLinear if on_gpu else GroupedLinear)
        assert layer.layout == layout
        torch.testing.assert_close(layer.dequantize(torch.float32), expected.weight, rtol=1e-5, atol=1e-6)
    with caplog.at_level(logging.INFO):
        dequantized = check_equal(*folders)
    assert type(dequantized.model.layers[0].mlp.down_proj) is torch.nn.Linear


@pytest.mark.parametrize("name", FILES)
def test_the_cpu_kernels_multiply_them(tmp_path, name):
    need_cpu_kernels()
    write, layout = FILES[name]
    model = load_model(write(tmp_path)[0], dtype=torch.float32, forms=KeptForms(groups="cpu"))
    torch.manual_seed(0)
    for leaf in ("self_attn.qkv_proj", "mlp.down_proj"):
        layer = model.get_submodule(f"model.layers.0.{leaf}")
        x = torch.randn(5, layer.in_features)
        expected = rounded_inputs(x, layout.size) @ layer.dequantize(torch.float32).t()
        found = packed_for_kernels(layer)(x)
        assert (found - expected).norm() < 0.01 * expected.norm()  # scales and minimums are rounded


@pytest.mark.parametrize("name", ["compressed-tensors, groups", "GPTQ"])
def test_a_network_runs_on_the_cpu_kernels(tmp_path, name):
    need_cpu_kernels()
    folders = FILES[name][0](tmp_path)
    backend = test_gguf.network_of(folders[0], kv_cache_dtype="float32")
    assert backend.decode_path == "CPU kernels"
    assert not any(isinstance(module, GroupedLinear) for module in backend.model.modules())  # all are packed
    expected = test_gguf.prefill(test_gguf.network_of(folders[1], kv_cache_dtype="float32"))
    # Inputs are rounded to 8 bits: int8 weights with a scale for each row are 3 % off in this network, too.
    assert (test_gguf.prefill(backend) - expected).norm() < 0.05 * expected.norm()


def test_projections_of_4_and_8_bits_are_in_one_module(tmp_path, caplog):
    four, eight = (test_compressed_tensors.packed(32, bits, symmetric=False) for bits in (4, 8))
    packed, plain = (
        write_packed(tmp_path / str(i), pack, test_compressed_tensors.config("pack-quantized", INT8))
        for i, pack in enumerate((four, eight))
    )
    mixed = mix(packed, plain, tmp_path)
    with caplog.at_level(logging.INFO):
        model = check_equal(*mixed, forms=KeptForms(groups="cpu"))
    assert "dequantized" not in caplog.text
    qkv = model.model.layers[0].self_attn.qkv_proj
    assert isinstance(qkv, JoinedLinear)
    assert [type(part) for part in qkv.parts] == [Int4Linear, Int4Linear, GroupedLinear]
    assert isinstance(model.model.layers[0].mlp.down_proj, GroupedLinear)


def test_projections_beside_floats_are_kept(tmp_path, caplog):
    pack = test_compressed_tensors.packed(32, 8)
    folders = write_packed(
        tmp_path, pack, test_compressed_tensors.config("pack-quantized", INT8), plain=("k_proj", "o_proj")
    )
    model = check_equal(*folders, forms=KeptForms(groups="cpu"))
    qkv = model.model.layers[0].self_attn.qkv_proj
    assert [type(part) for part in qkv.parts] == [GroupedLinear, torch.nn.Linear, GroupedLinear]
    assert type(model.model.layers[0].self_attn.o_proj) is torch.nn.Linear


def mix(four, eight, folder):
    """Folders whose values and feed-forward layers have 8 bits, and all else 4."""
    found = []
    for i, kind in enumerate(("packed", "plain")):
        tensors = load_file(four[i] / "model.safetensors")
        others = load_file(eight[i] / "model.safetensors")
        tensors |= {name: tensor for name, tensor in others.items() if "v_proj" in name or "mlp" in name}
        found.append(folder / "mixed" / kind)
        found[-1].mkdir(parents=True)
        save_file(tensors, found[-1] / "model.safetensors")
        (found[-1] / "config.json").write_bytes((four[i] / "config.json").read_bytes())
    return found
