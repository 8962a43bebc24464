"""Faster layers give what the plain ones give, or are not used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flambeau.llm.quantize import packed_layers as fast_layers
from flambeau.llm.quantize.packed_layers import CpuInt4Linear, CpuInt8Linear, use_fast_layers
from flambeau.llm.quantize.quantizer import quantized_layer
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from support.log_records import logged


def layer_of(kind, linear, group_size=32):
    return quantized_layer(linear, QuantizationSettings(kind=kind, group_size=group_size))


class TestFasterLayers:
    @pytest.mark.parametrize(("kind", "faster"), [("int8", CpuInt8Linear), ("int4", CpuInt4Linear)])
    def test_they_give_what_their_twins_give_whatever_the_batch(self, linear, kind, faster):
        model = nn.ModuleDict({"layer": layer_of(kind, linear)})
        x = torch.randn(2, 20, 128)
        expected = model.layer(x)
        use_fast_layers(model, torch.float32)
        assert isinstance(model.layer, faster)
        y = model.layer(x)
        assert (y - expected).abs().max() < 0.01 * expected.abs().max()
        assert torch.equal(torch.cat([model.layer(x[:, i : i + 1]) for i in range(20)], dim=1), y)
        by_columns = x[0].t().contiguous().t()  # as a convolution leaves it
        assert torch.equal(model.layer(by_columns), y[0])

    @pytest.mark.parametrize("kind", ["int8", "int4"])
    @pytest.mark.parametrize("shape", [(32, 1), (96, 7), (160, 24), (64, 33)])
    def test_odd_shapes_are_computed_one_way_or_the_other(self, kind, shape):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layer": layer_of(kind, nn.Linear(*shape).requires_grad_(False))})
        x = torch.randn(3, shape[0])
        expected = model.layer(x)
        use_fast_layers(model, torch.float32)
        assert (model.layer(x) - expected).abs().max() <= 0.01 * expected.abs().max()

    @pytest.mark.parametrize("kind", ["int8", "int4"])
    def test_no_tokens_give_no_outputs(self, linear, kind):
        """The last layer has none in a step of a prompt that goes on."""
        model = nn.ModuleDict({"layer": layer_of(kind, linear)})
        use_fast_layers(model, torch.float32)
        assert model.layer(torch.ones(0, 128)).shape == (0, 48)

    def test_rows_that_pytorch_cannot_read_stay_as_they_are(self):
        model = nn.ModuleDict({"layer": layer_of("int8", nn.Linear(56, 8).requires_grad_(False))})
        use_fast_layers(model, torch.float32)
        assert isinstance(model.layer, Int8Linear)

    def test_one_that_is_wrong_on_this_machine_is_not_used(self, linear, monkeypatch, caplog):
        monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda x, weight, scale: x.new_zeros(len(x), len(weight)))
        model = nn.ModuleDict({"layer": layer_of("int8", linear)})
        use_fast_layers(model, torch.float32)
        assert isinstance(model.layer, Int8Linear)
        [(kind, error)] = logged(caplog, "flambeau.llm.quantize.packed_layers")
        assert (kind, type(error)) == ("Int8Linear", RuntimeError)

    def test_one_that_is_not_there_is_not_used(self, linear, monkeypatch):
        monkeypatch.delattr(torch, "_weight_int8pack_mm")
        model = nn.ModuleDict({"layer": layer_of("int8", linear)})
        use_fast_layers(model, torch.float32)
        assert isinstance(model.layer, Int8Linear)

    def test_fp8_has_none_on_a_cpu(self, linear):
        assert fast_layers.fast_layer_for(layer_of("fp8", linear), torch.float32) is None

    def test_weights_anywhere_in_a_mapped_file_can_be_read(self, linear):
        layer = layer_of("int8", linear)
        storage = torch.empty(layer.weight.numel() + 128, dtype=torch.int8)
        start = (8 - storage.data_ptr()) % 64  # eight bytes past a multiple of 64, as in a safetensors file
        layer.weight = storage[start : start + layer.weight.numel()].view_as(layer.weight).copy_(layer.weight)
        assert layer.weight.data_ptr() % 64 == 8
        fast = CpuInt8Linear(layer)
        assert fast.weight.data_ptr() % 64 == 0  # else the process dies below, on some processors
        x = torch.randn(4, 128)
        torch.testing.assert_close(fast(x), layer(x), atol=0.05, rtol=0.05)
