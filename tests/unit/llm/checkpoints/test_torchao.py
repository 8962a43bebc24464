"""Checkpoints of torchao: the parts of a tensor are in the file, its class in the header."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.errors import CheckpointError
from flambeau.llm.quantize.row_scaled import Fp8Linear
from support.packed_checkpoints import check_equal, write_packed

TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}


def write(folder, pack, kind):
    """Two folders, with the class of each quantized tensor in the header of the first one's file."""
    folders = write_packed(folder, pack, TORCHAO)
    file = folders[0] / "model.safetensors"
    tensors = load_file(file)
    ends = "._weight_qdata"
    layers = [name.removesuffix(ends) for name in tensors if name.endswith(ends)]
    save_file(tensors, file, {f"{name}.weight": json.dumps({"_type": kind, "_data": {}}) for name in layers})
    return folders


def integers(weight, middle=1):
    """Four bits in a byte each, in groups of 32 with zeros."""
    groups = weight.unflatten(1, (-1, 32))
    zero = torch.full((weight.shape[0], weight.shape[1] // 32), middle, dtype=torch.int8)
    scale = groups.abs().amax(2) / 6
    stored = (groups / scale.unsqueeze(2) + zero.unsqueeze(2)).round().clamp(-8, 7)
    plain = ((stored - zero.unsqueeze(2)) * scale.unsqueeze(2)).flatten(1)
    parts = {"qdata": stored.flatten(1).to(torch.int8), "scale": scale, "zero_point": zero}
    return {f"_weight_{part}": tensor for part, tensor in parts.items()}, plain


def fp8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"_weight_qdata": stored, "_weight_scale": scale}, stored.float() * scale


@pytest.mark.parametrize("forms", [NO_FORMS, KeptForms(groups="cpu")])
def test_small_integers_with_zeros_are_dequantized(tmp_path, forms):
    model = check_equal(*write(tmp_path, integers, "IntxUnpackedToInt8Tensor"), forms=forms)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, torch.nn.Linear)


def test_fp8_by_row_is_ours(tmp_path):
    model = check_equal(*write(tmp_path, fp8, "Float8Tensor"))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Fp8Linear)


def test_other_classes_are_refused_by_name(tmp_path):
    folder, _ = write(tmp_path, fp8, "Int4TilePackedTo4dTensor")
    with pytest.raises(CheckpointError, match="Int4TilePackedTo4dTensor"):
        load_model(folder)


def test_scaled_inputs_are_refused(tmp_path):
    def pack(weight):
        return {**fp8(weight)[0], "_weight_act_pre_scale": torch.ones(weight.shape[1])}, weight

    folder, _ = write(tmp_path, pack, "Int8Tensor")
    with pytest.raises(CheckpointError, match="act_pre_scale"):
        load_model(folder)
