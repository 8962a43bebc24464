"""The kernels give what their plain twins give, for weights of all types."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.backends.cpu import network
from flambeau.llm.backends.cpu.packed_experts import PackedStack, pack_experts
from flambeau.llm.backends.cpu.packed_linear import pack_layers
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.quantizer import ExpertStack, quantize
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from support.kernel_families import logits_of_both, model_of
from support.llm_steps import random_model, room

INTEGER_FAMILIES = (
    "GPT-NeoX",
    "GPT-2",
    "BLOOM",
    "Command R",
    "OLMo 2",
    "Mixtral",
    "Qwen 2 MoE",
    "LFM2",
    "Jamba",
    "Granite 4",
    "Qwen 3.5",
    "DeepSeek V2 Lite",
    "BitNet",
    "Mistral 4",
    "GLM-5",
    "Gemma 3n",
    "ModernBERT",
    "RecurrentGemma",
    "RWKV 4",
    "Zamba 2",
)


pytestmark = [
    pytest.mark.timeout(300),  # the kernels may have to be built, on a busy machine
    pytest.mark.usefixtures("loaded"),
]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", INTEGER_FAMILIES)
def test_networks_of_other_families_give_the_logits_of_their_quantized_layers(family, kind):
    model = quantize(model_of(family, intermediate_size=64), kind, group_size=32, lm_head=True)
    pack_layers(model, (Int8Linear, Int4Linear))
    assert network.can_compute(model, room(model, 1))
    unpacked, _ = logits_of_both(model)
    pack_experts(model, packs_float32=True)
    found, layer_by_layer = logits_of_both(model)
    assert torch.equal(found, unpacked)
    assert (found - layer_by_layer).norm() / layer_by_layer.norm() < 0.01  # inputs near a limit round either way


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("family", ["Qwen 2", "Mixtral"])
def test_fp8_weights_give_the_logits_of_the_dequantized_network(family, block_size):
    model = model_of(family, intermediate_size=64)
    quantize(model, "fp8", lm_head=True)
    for module in model.modules():
        if isinstance(module, Fp8Linear | ExpertStack) and block_size:
            scales = torch.linspace(0.5, 1, module.weight.shape[-1] // block_size)
            module.scale = module.scale.unsqueeze(-1) * scales
    assert network.can_compute(model, room(model, 1))
    unpacked, expected = logits_of_both(model)
    pack_layers(model, (Fp8Linear,))
    pack_experts(model, packs_float32=True)
    assert not any(isinstance(module, Fp8Linear | ExpertStack) for module in model.modules())
    found, layer_by_layer = logits_of_both(model)
    for logits in (unpacked, found, layer_by_layer):
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("packs_float32", [True, False])
def test_experts_of_any_floats_are_packed_or_read_as_they_are(packs_float32, monkeypatch):
    monkeypatch.setattr(network, "PACKED_FLOAT32_BYTES", 1 << 30 if packs_float32 else 0)
    model = model_of("Mixtral")
    expected = logits_of_both(model)[1]
    pack_experts(model, packs_float32=packs_float32)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, PackedStack) == packs_float32
    for logits in logits_of_both(model):
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=2e-5)


def test_experts_of_16_bits_give_the_twins_logits_within_their_rounding():
    model = model_of("Mixtral").to(torch.bfloat16)
    found, expected = logits_of_both(model, torch.bfloat16)
    assert (found - expected).norm() / expected.norm() < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("family", ["LFM2", "Jamba", "Granite 4", "Qwen 3.5", "DeepSeek V3"])
def test_parts_of_16_bits_give_the_twins_logits_within_their_rounding(family):
    model = model_of(family)
    expected = logits_of_both(model.to(torch.bfloat16).float())[1]
    found = logits_of_both(model.to(torch.bfloat16), torch.bfloat16)[0]
    assert (found - expected).norm() / expected.norm() < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_of_16_bits_gives_the_twins_logits_within_its_rounding(dtype):
    model = random_model(head_size=16).to(dtype)
    found, expected = logits_of_both(model, dtype)
    assert (found - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_network_gives_the_logits_of_its_layers(kind):
    model = quantize(random_model(head_size=16, intermediate_size=64), kind, group_size=32, lm_head=True)
    found, plain = logits_of_both(model, torch.float16)
    assert (found - plain).norm() / plain.norm() < 0.03  # the plain layers do not round their inputs
    pack_layers(model, (Int8Linear, Int4Linear))
    again, layer_by_layer = logits_of_both(model, torch.float16)
    assert torch.equal(again, found)
    torch.testing.assert_close(again, layer_by_layer, atol=0.05, rtol=0.05)  # inputs near a limit round either way


def test_the_last_layer_has_8_bits_if_the_others_have_integer_weights():
    model = quantize(random_model(head_size=16, intermediate_size=64, tied_embeddings=True), "int4", group_size=32)
    found, plain = logits_of_both(model)
    assert 0 < (found - plain).norm() / plain.norm() < 0.03
