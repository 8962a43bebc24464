"""Checkpoints of compressed-tensors give the network that their numbers and scales stand for."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from flambeau.llm.backends.cpu.bindings import kernels
from flambeau.llm.backends.cpu.packed_linear import packed as packed_for_kernels
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.errors import CheckpointError
from flambeau.llm.quantize.coded import CodedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from support.packed_checkpoints import check_equal, to_levels, to_words, write_packed

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def config(form, weights, **options):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    groups = {"group_0": {**group, **options.pop("group", {})}}
    declared = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return {**declared, **options}


def packed(group_size=32, bits=4, *, symmetric=True, order=None):
    """Integers in words of consecutive inputs; zeros are packed along the outputs."""

    def pack(weight):
        size = group_size or weight.shape[1]
        groups = torch.arange(weight.shape[1]) // size if order is None else order(weight.shape[1])
        if symmetric:
            middle = 1 << (bits - 1)
            scales = (weight.unflatten(1, (-1, size)).abs().amax(2) / (middle - 1)).to(torch.bfloat16)
            levels = (weight / scales.float()[:, groups]).round().clamp(-middle, middle - 1).long() + middle
            zeros = torch.full(scales.shape, middle)
        else:
            levels, scales, zeros = to_levels(weight, size, bits)
        parts = {
            "weight_packed": to_words(levels, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = to_words(zeros.t(), bits).t()
        if order is not None:
            parts["weight_g_idx"] = groups.int()
        return parts, scales.float()[:, groups] * (levels - zeros[:, groups])

    return pack


def eight_bits(dtype, *, by="row", zero=False):
    """Numbers of eight bits with a scale for each row, for all, or for each block."""

    def pack(weight):
        limit = 127 if dtype == torch.int8 else 448
        if by == "block":
            blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 48, 0, -weight.shape[0] % 48))
            blocks = blocks.unflatten(0, (-1, 48)).unflatten(2, (-1, 48))
            scale = blocks.abs().amax((1, 3)) / limit
            wide = scale.repeat_interleave(48, 0).repeat_interleave(48, 1)[: weight.shape[0], : weight.shape[1]]
        else:
            scale = (weight.abs().amax(1, keepdim=True) if by == "row" else weight.abs().amax().view(1)) / limit
            wide = scale
        zeros = torch.full_like(scale, 3) if zero else torch.zeros(1)
        numbers = (weight / wide + zeros).clamp(-limit, limit)
        stored = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
        parts = {"weight": stored, "weight_scale": scale, "input_scale": torch.ones(1)}
        if zero:
            parts["weight_zero_point"] = zeros.to(torch.int8)
        return parts, (stored.float() - zeros) * wide

    return pack


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, None])
def test_packed_groups_of_4_bits_are_ours(tmp_path, symmetric, group_size):
    pack = packed(group_size, symmetric=symmetric)
    model = check_equal(*write_packed(tmp_path, pack, config("pack-quantized", INT4)))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Int4Linear)


def test_packed_8_bits_by_row_are_ours_and_in_groups_dequantized(tmp_path):
    rows = check_equal(*write_packed(tmp_path / "rows", packed(None, 8), config("pack-quantized", INT8)))
    assert isinstance(rows.model.layers[0].mlp.down_proj, Int8Linear)
    groups = check_equal(*write_packed(tmp_path / "groups", packed(32, 8), config("pack-quantized", INT8)))
    assert isinstance(groups.model.layers[0].mlp.down_proj, torch.nn.Linear)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 6])
def test_other_bits_are_dequantized(tmp_path, bits, symmetric):
    pack = packed(32, bits, symmetric=symmetric)
    check_equal(*write_packed(tmp_path, pack, config("pack-quantized", {**INT4, "num_bits": bits})))


def test_inputs_in_another_order_are_dequantized(tmp_path):
    def order(size):
        return (torch.arange(size) // 32)[torch.randperm(size, generator=torch.Generator().manual_seed(1))]

    model = check_equal(*write_packed(tmp_path, packed(order=order), config("pack-quantized", INT4)))
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)


@pytest.mark.parametrize("by", ["row", "tensor"])
def test_8_bit_integers_are_ours(tmp_path, by, caplog):
    group = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    with caplog.at_level(logging.INFO):
        declared = config("int-quantized", INT8, group=group)
        model = check_equal(*write_packed(tmp_path, eight_bits(torch.int8, by=by), declared))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Int8Linear)
    assert "14 layers stay int8; its quantization of activations is not used" in caplog.text


def test_8_bit_integers_with_zeros_are_dequantized(tmp_path):
    check_equal(*write_packed(tmp_path, eight_bits(torch.int8, zero=True), config("int-quantized", INT8)))


@pytest.mark.parametrize("by", ["row", "tensor"])
def test_fp8_is_ours(tmp_path, by):
    declared = config("float-quantized", FP8, kv_cache_scheme={"num_bits": 8})
    model = check_equal(*write_packed(tmp_path, eight_bits(torch.float8_e4m3fn, by=by), declared))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Fp8Linear)


def test_fp8_in_blocks_is_dequantized(tmp_path):
    declared = config("float-quantized", {**FP8, "strategy": "block", "block_structure": [48, 48]})
    check_equal(*write_packed(tmp_path, eight_bits(torch.float8_e4m3fn, by="block"), declared))


def test_groups_of_fp8_with_exponents_are_dequantized(tmp_path):
    def pack(weight):
        groups = weight.unflatten(1, (-1, 32))
        stored = (torch.log2(groups.abs().amax(2) / 448).ceil() + 127).to(torch.uint8)
        scale = torch.exp2(stored.float() - 127).unsqueeze(2)
        numbers = (groups / scale).to(torch.float8_e4m3fn)
        parts = {"weight": numbers.flatten(1), "weight_scale": stored}
        return parts, (numbers.float() * scale).flatten(1)

    folders = write_packed(tmp_path, pack, config("mxfp8-quantized", {**FP8, "group_size": 32}))
    check_equal(*folders)
    assert check_equal(*folders, forms=KeptForms(blocks=True)).model.layers[0].mlp.down_proj.scale.shape == (128, 8)


@pytest.mark.parametrize("kept", ["", "blocks", "codes"])
@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_4_bit_floating_point_is_dequantized_or_stays_as_fp8_or_as_codes(tmp_path, form, kept):
    def pack(weight):
        size = 16 if form.startswith("nv") else 32
        groups = weight.unflatten(1, (-1, size))
        high = groups.abs().amax(2)
        if form.startswith("nv"):
            whole = torch.tensor([448 * 6.0]) / high.max()
            stored = (high / 6 * whole).to(torch.float8_e4m3fn)
            scale, more = stored.float() / whole, {"weight_global_scale": whole}
        else:
            stored = (torch.log2(high / 6).ceil() + 127).to(torch.uint8)
            scale, more = torch.exp2(stored.float() - 127), {}
        codes = ((groups / scale.unsqueeze(2)).unsqueeze(3) - FP4).abs().argmin(3).flatten(1).to(torch.uint8)
        plain = (FP4[codes.int()].unflatten(1, (-1, size)) * scale.unsqueeze(2)).flatten(1)
        return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": stored, **more}, plain

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"}
    folders = write_packed(tmp_path, pack, config(form, weights))
    model = check_equal(*folders, forms=KeptForms(blocks=bool(kept), codes=kept == "codes"))
    layer = model.model.layers[0].mlp.down_proj
    assert type(layer) is {"": torch.nn.Linear, "blocks": Fp8Linear, "codes": CodedLinear}[kept]
    if kept == "codes":
        scale_dtype = torch.float32 if form.startswith("nv") else torch.bfloat16  # of powers of two
        assert (layer.layout.table, layer.scales.dtype) == (tuple(FP4.tolist()), scale_dtype)
    if kept == "blocks" and kernels.load():
        assert packed_for_kernels(layer).kind == ("fp4_wide" if form.startswith("nv") else "fp4")


def test_the_older_key_of_the_configuration_is_read(tmp_path):
    folders = write_packed(tmp_path, packed(), config("pack-quantized", INT4))
    file = folders[0] / "config.json"
    content = json.loads(file.read_text())
    content["compression_config"] = content.pop("quantization_config")
    file.write_text(json.dumps(content))
    check_equal(*folders)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        (config("marlin-24", INT4), "'marlin-24'"),
        (config("pack-quantized", {**INT4, "rotated": True}), "weights.rotated"),
        (config("pack-quantized", INT4, sparsity_config={"format": "sparse-bitmask"}), "'sparse-bitmask'"),
        (config("pack-quantized", INT4, transform_config={"config_groups": {"a": {}}}), "transform_config"),
        (config("pack-quantized", INT4, something="new"), "something"),
    ],
)
def test_other_variants_are_refused_by_name(tmp_path, declared, named):
    folder, _ = write_packed(tmp_path, packed(), declared)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder)
