"""A norm and the product after it in one kernel give what the two give: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.backends.cuda.norm_product import is_joinable, is_plain, multiply_normalized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 0.01 if DEVICE.type == "cuda" else 1e-5
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]


def relative_difference(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def random(*shape, dtype=DTYPE):
    return torch.randn(shape).to(DEVICE, dtype)


def linear(num_outputs, num_inputs, *, has_bias=False):
    layer = torch.nn.Linear(num_inputs, num_outputs, bias=has_bias)
    return KernelLinear(
        layer=layer,
        weight=random(num_outputs, num_inputs),
        bias=random(num_outputs) if has_bias else None,
    )


def plain(layer, x):
    y = x.float() @ layer.weight.float().T
    return y if layer.bias is None else y + layer.bias.float()


@pytest.mark.parametrize("parts", [None, (1, 96), (3, 1, 96)])
@pytest.mark.parametrize("options", [{}, {"has_bias": True}])
def test_a_norm_and_a_product(parts, options):
    torch.manual_seed(0)
    x, gain = random(1, 96), random(96)
    sums = None if parts is None else random(*parts)
    norm = NormParameters(gain=gain, epsilon=1e-5, residual_scale=0.5)
    layer = linear(30, 96, **options)
    assert is_joinable(norm, layer)
    expected = x.clone()
    normal = norm(expected, sums)
    before = x.clone()
    kept, y = multiply_normalized(x, sums, norm, layer)
    torch.testing.assert_close(kept, expected)
    assert torch.equal(x, before)
    assert relative_difference(y, plain(layer, normal)) < TOLERANCE


def test_the_outputs_of_a_second_layer_follow():
    torch.manual_seed(0)
    x, sums = random(1, 96), random(1, 96)
    norm = NormParameters(gain=random(96), epsilon=1e-5)
    first, second = linear(18, 96), linear(27, 96)
    assert is_plain(first)
    assert not is_plain(linear(4, 96, has_bias=True))
    _, y = multiply_normalized(x, sums, norm, first, second)
    normal = norm(x, sums)
    assert relative_difference(y, torch.cat((plain(first, normal), plain(second, normal)), 1)) < TOLERANCE


def test_other_norms_and_gated_layers_are_computed_apart():
    layer, gain = linear(8, 96), random(96)
    norm = NormParameters(gain=gain, epsilon=1e-5)
    gated = KernelLinear(layer=layer.layer, weight=layer.weight, gates=True, activation="silu")
    assert not is_joinable(norm, gated)
    assert not is_joinable(NormParameters(gain=gain, epsilon=1e-5, bias=gain), layer)
    assert not is_joinable(norm, linear(2, 5000))
    assert not is_joinable(norm, KernelLinear(layer=layer.layer, weight=layer.weight, scale=gain))
