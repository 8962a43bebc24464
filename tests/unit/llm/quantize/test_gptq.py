"""Weights that are quantized for their inputs change the outputs less than rounding does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flambeau.llm.quantize.gptq import (
    QuantizedRows,
    integer_zeros,
    quantize_for_inputs,
    round_to_groups,
    symmetric,
)
from flambeau.llm.quantize.int4 import Int4Linear, scale_and_minimum

GRIDS = {"minimums": scale_and_minimum, "zeros": integer_zeros, "symmetric": symmetric}


@pytest.fixture(scope="module")
def layer():
    """Weights, and inputs that are related to each other."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 192, generator=generator)
    mixed = torch.randn(60, 192, generator=generator)
    return weight, torch.randn(400, 60, generator=generator) @ mixed


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("group_size", [32, 64])
def test_outputs_change_less_than_with_rounding(layer, grid, group_size):
    weight, x = layer
    chosen = quantize_for_inputs(weight, x.t() @ x, group_size, GRIDS[grid])
    rounded = round_to_groups(weight, group_size, GRIDS[grid])
    before = x @ weight.t()
    errors = [(x @ rows.dequantize().t() - before).square().mean() for rows in (chosen, rounded)]
    assert errors[0] < 0.7 * errors[1]
    assert chosen.levels.max() <= 15
    assert chosen.scales.shape == (24, 192 // group_size)


def test_inputs_that_tell_nothing_give_rounded_weights(layer):
    weight, _ = layer
    chosen = quantize_for_inputs(weight, torch.zeros(192, 192), 64)
    assert (chosen.dequantize() - weight).abs().max() < 0.5
    chosen = quantize_for_inputs(weight, torch.eye(192), 64)
    assert torch.equal(chosen.levels, round_to_groups(weight, 64, scale_and_minimum).levels)


def test_zeros_are_whole_numbers(layer):
    rows = quantize_for_inputs(layer[0], torch.eye(192), 32, partial(integer_zeros, dtype=torch.float16))
    zeros = -rows.minimums / rows.scales
    torch.testing.assert_close(zeros, zeros.round())
    assert torch.equal(rows.scales, rows.scales.half().float())


def test_rows_are_those_of_a_layer(layer):
    rows = quantize_for_inputs(layer[0], torch.eye(192), 32)
    linear = Int4Linear(192, 24, group_size=32)
    for name, tensor in rows.packed().items():
        setattr(linear, name, tensor)
    torch.testing.assert_close(linear.dequantize(torch.float32), rows.dequantize())
    assert isinstance(rows[2:5], QuantizedRows)
    assert torch.equal(rows[2:5].dequantize(), rows.dequantize()[2:5])
