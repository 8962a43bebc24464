"""Checkpoints that are written in the format of compressed-tensors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from flambeau.llm.calibration import calibrate_model
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.compressed_writer import compressed_grid, pack_words
from flambeau.llm.checkpoints.packed_layouts import unpack_words
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.errors import CheckpointError
from flambeau.llm.quantize.gptq import round_to_groups
from flambeau.llm.quantize.int4 import Int4Linear, scale_and_minimum
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear, dequantize_rows, quantize_fp8, quantize_int8
from flambeau.llm.quantize.settings import QuantizationSettings
from support.checkpoints import write_checkpoint
from support.packed_checkpoints import PACKABLE
from support.tiny_models import tiny_model
from support.weights import logits_of, write_folder

KINDS = {"int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear}
IDS = [(7 * i * i + 3 * i) % 97 for i in range(600)]


def write(folder, kind, model=None, **options):
    model = write_folder(folder / "original", model or tiny_model(PACKABLE))
    options = {"form": "compressed-tensors", "group_size": 32, "device": "cpu", **options}
    save_quantized(folder / "original", folder / "small", kind, **options)
    return model, load_model(folder / "small", dtype=torch.float32)


def expected_logits(model, kind):
    """Of a network whose weights are rounded in memory."""
    model = copy.deepcopy(model)
    parameters = model.model.layers.named_parameters()
    for weight in [one for name, one in parameters if one.dim() > 1 and ".gate." not in name]:
        rows = weight.flatten(0, -2)
        if kind == "int4":
            rounded = round_to_groups(rows, 32, compressed_grid(model.arch)).dequantize()
        else:
            rounded = dequantize_rows(*(quantize_int8 if kind == "int8" else quantize_fp8)(rows), torch.float32)
        weight.copy_(rounded.view_as(weight))
    return logits_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_checkpoint_is_read_as_the_same_kind(tmp_path, kind):
    model, found = write(tmp_path, kind)
    assert isinstance(found.model.layers[1].self_attn.qkv_proj, KINDS[kind])
    torch.testing.assert_close(logits_of(found), expected_logits(model, kind), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_written_one_by_one(tmp_path, kind):
    model, found = write(tmp_path, kind, tiny_model(replace(PACKABLE, num_experts=4, expert_size=256)))
    torch.testing.assert_close(logits_of(found), expected_logits(model, kind), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{i}.block_sparse_moe.gate" for i in range(2))]
    assert config["config_groups"]["group_0"]["weights"]["symmetric"]


def test_names_and_numbers_are_those_of_the_format(tmp_path):
    write(tmp_path, "int4")
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    start = "model.layers.0.mlp.down_proj."
    shapes = {name.removeprefix(start): list(value.shape) for name, value in tensors.items() if start in name}
    assert shapes == {
        "weight_packed": [128, 32],
        "weight_scale": [128, 8],
        "weight_shape": [2],
        "weight_zero_point": [16, 8],
    }
    levels = unpack_words(tensors[f"{start}weight_packed"], 4, 256).float()
    zeros = unpack_words(tensors[f"{start}weight_zero_point"].t().contiguous(), 4, 128).t().float()
    scale = tensors[f"{start}weight_scale"].float()
    weight = ((levels.view(128, 8, 32) - zeros.unsqueeze(2)) * scale.unsqueeze(2)).flatten(1)
    original = load_file(tmp_path / "original" / "model.safetensors")[f"{start}weight"]
    assert (weight - original).abs().max() <= scale.max() * 2
    assert torch.nn.functional.cosine_similarity(weight.flatten(), original.flatten(), dim=0) > 0.99


def test_layers_that_do_not_divide_into_groups_stay(tmp_path):
    odd = tiny_model(replace(PACKABLE, intermediate_size=144))
    _, found = write(tmp_path, "int4", odd)
    assert isinstance(found.model.layers[0].mlp.down_proj, torch.nn.Linear)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in config["ignore"]


@pytest.mark.parametrize("form", ["flambeau", "compressed-tensors"])
def test_calibrated_weights_are_written_as_they_are(tmp_path, form):
    model = tiny_model(PACKABLE)
    grid = scale_and_minimum if form == "flambeau" else compressed_grid(model.arch)
    settings = QuantizationSettings(kind="int4", group_size=32)
    weights = calibrate_model(model, IDS, settings, grid)  # the network computes with them now
    _, found = write(tmp_path, "int4", tiny_model(PACKABLE), form=form, calibrated=weights)
    torch.testing.assert_close(logits_of(found), logits_of(model), rtol=1e-4, atol=1e-4)


def test_weights_of_another_form_are_refused(tmp_path):
    write_checkpoint(tmp_path / "original", "gpt-2")
    with pytest.raises(CheckpointError, match="--format flambeau"):
        save_quantized(tmp_path / "original", tmp_path / "small", "int8", form="compressed-tensors")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 13), (8, 8), (8, 5)])
def test_words_hold_their_numbers(bits, size):
    values = torch.randint(0, 1 << bits, (3, size), generator=torch.Generator().manual_seed(size))
    assert torch.equal(unpack_words(pack_words(values, bits), bits, size).long(), values)
