"""Checkpoints of bitsandbytes give the network that their codes and maxima stand for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families import llama_like
from flambeau.llm.network_loader import load_network
from flambeau.llm.quantize.coded import CodedLinear, CodeLayout
from flambeau.llm.quantize.row_scaled import Int8Linear
from support.cpu_kernels import need_cpu_kernels
from support.packed_checkpoints import PACKABLE, check_equal, write_packed
from support.tiny_models import tiny_model
from support.weights import logits_of

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
TABLE = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.5
MAXIMA = torch.linspace(-1, 1, 256)  # of maxima that are quantized


def state(values):
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def four_bits(weight, *, nested=False, kind="nf4", shape=None):
    """Blocks of 64 codes, the first of a byte in its upper half; 8 maxima share another."""
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    described = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": shape or list(weight.shape)}
    parts = {"weight.absmax": largest}
    if nested:
        offset = float(largest.mean())
        outer = (largest - offset).view(-1, 8).abs().amax(1)
        codes = ((largest - offset).view(-1, 8) / outer.unsqueeze(1)).unsqueeze(2).sub(MAXIMA).abs().argmin(2)
        largest = (MAXIMA[codes] * outer.unsqueeze(1)).flatten() + offset
        parts = {
            "weight.absmax": codes.flatten().to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": MAXIMA,
        }
        described |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": offset}
    codes = ((blocks / largest.unsqueeze(1)).unsqueeze(2) - TABLE).abs().argmin(2)
    flat = codes.flatten().to(torch.uint8)
    parts |= {
        "weight": (flat[::2] << 4 | flat[1::2]).view(-1, 1),
        "weight.quant_map": TABLE,
        f"weight.quant_state.bitsandbytes__{kind}": state(described),
    }
    return parts, (TABLE[codes] * largest.unsqueeze(1)).view_as(weight)


def eight_bits(weight, layout=0):
    largest = weight.abs().amax(1)
    stored = (weight / largest.unsqueeze(1) * 127).round().to(torch.int8)
    parts = {"weight": stored, "SCB": largest, "weight_format": torch.tensor(layout, dtype=torch.uint8)}
    return parts, stored * largest.unsqueeze(1) / 127


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits_are_dequantized(tmp_path, nested, kind):
    folders = write_packed(tmp_path, lambda weight: four_bits(weight, nested=nested, kind=kind), FOUR)
    assert isinstance(check_equal(*folders).model.layers[0].mlp.down_proj, torch.nn.Linear)


@pytest.mark.parametrize("nested", [False, True])
def test_codes_stay_for_kernels_that_know_them(tmp_path, nested):
    folders = write_packed(tmp_path, lambda weight: four_bits(weight, nested=nested), FOUR)
    layer = check_equal(*folders, forms=KeptForms(codes=True)).model.layers[0].mlp.down_proj
    assert isinstance(layer, CodedLinear)
    assert layer.layout == CodeLayout(tuple(TABLE.tolist()), 64)


def test_codes_stay_in_4_bits_on_the_cpu_kernels(tmp_path):
    need_cpu_kernels()
    folder, plain = write_packed(tmp_path, four_bits, FOUR)
    config = EngineConfig(device="cpu", num_blocks=16, block_size=4)
    backend = load_network(folder, config, torch.device("cpu"), None).backend
    assert backend.decode_path == "CPU kernels"
    layers = [module for name, module in backend.model.named_modules() if name.endswith("_proj")]
    assert {layer.kind for layer in layers} == {"codes"}
    found, expected = (logits_of(model) for model in (backend.model, load_model(plain, dtype=torch.float32)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_codes_in_blocks_that_do_not_divide_rows_are_dequantized(tmp_path):
    def pack(weight):
        if weight.shape[1] != 128:
            return {"weight": weight}, weight
        parts, _ = four_bits(weight)
        name = "weight.quant_state.bitsandbytes__nf4"
        described = json.loads(bytes(parts[name].tolist())) | {"blocksize": 48}
        blocks = -(-weight.numel() // 48)
        parts |= {name: state(described), "weight.absmax": torch.ones(blocks)}
        codes = torch.stack((parts["weight"] >> 4, parts["weight"] & 15), -1).flatten().int()
        return parts, TABLE[codes].view_as(weight)

    model = check_equal(*write_packed(tmp_path, pack, FOUR), forms=KeptForms(codes=True))
    assert not any(isinstance(module, CodedLinear) for module in model.modules())


@pytest.mark.parametrize(("pack", "quantization"), [(four_bits, FOUR), (lambda weight: eight_bits(weight), EIGHT)])
def test_a_last_layer_whose_rows_have_to_be_normalized_is_dequantized(tmp_path, monkeypatch, pack, quantization):
    monkeypatch.setattr(llama_like, "BAICHUAN_7B_SIZE", PACKABLE.hidden_size)
    monkeypatch.setattr(llama_like, "BAICHUAN_2_VOCABULARY", PACKABLE.vocab_size)
    model = tiny_model(replace(PACKABLE, num_kv_heads=PACKABLE.num_heads))
    family = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"}
    folders = write_packed(tmp_path, pack, quantization, model=model, **family)
    for folder, is_packed in zip(folders, (True, False), strict=True):
        tensors = load_file(folder / "model.safetensors")
        parts, plain = pack(tensors.pop("lm_head.weight"))
        head = {f"lm_head.{leaf}": part for leaf, part in parts.items()} if is_packed else {"lm_head.weight": plain}
        save_file({**tensors, **head}, folder / "model.safetensors")
    found = check_equal(*folders, forms=KeptForms(codes=True))
    assert type(found.lm_head) is torch.nn.Linear
    assert type(found.model.layers[0].mlp.down_proj) is not torch.nn.Linear


def test_codes_may_be_stored_as_numbers_of_another_type(tmp_path):
    def pack(weight):
        parts, plain = four_bits(weight)
        return {**parts, "weight": parts["weight"].flatten().view(torch.bfloat16).view(-1, 1)}, plain

    check_equal(*write_packed(tmp_path, pack, {**FOUR, "bnb_4bit_quant_storage": "bfloat16"}))


def test_int8_is_ours(tmp_path):
    model = check_equal(*write_packed(tmp_path, eight_bits, EIGHT))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Int8Linear)


@pytest.mark.parametrize(
    ("pack", "named"),
    [
        (lambda weight: eight_bits(weight, 2), "weight_format"),
        (lambda weight: four_bits(weight, shape=[3, 5]), "do not fit together"),
        (lambda weight: four_bits(weight, shape="wide"), "quant_state"),
        (lambda weight: ({"weight.quant_state.bitsandbytes__nf4": state({})}, weight), "has its weight"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, pack, named):
    folder, _ = write_packed(tmp_path, pack, FOUR)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder)
