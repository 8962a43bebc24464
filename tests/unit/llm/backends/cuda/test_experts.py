"""The kernels of experts and routers give what the layer gives: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.quantize.quantizer import quantize_experts, quantized_layer
from flambeau.llm.quantize.settings import QuantizationSettings

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import expert_tiles, experts, router
from flambeau.llm.backends.cuda.feed_forward import can_compute_experts, kernel_experts
from flambeau.llm.backends.cuda.norm import normalize
from flambeau.llm.backends.cuda.router import can_route, experts_of_a_program, route

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
GROUPS = {"num_experts": 16, "num_expert_groups": 4, "num_chosen_groups": 2}
ROUTERS = {
    "Mixtral": {},
    "not normalized": {"normalizes_experts": False},
    "Llama 4": {"router": "sigmoid", "normalizes_experts": False},
    "GLM 4.5": {"router": "biased_sigmoid", "routed_scale": 2.5},
    "Ernie 4.5": {"router": "biased_softmax"},
    "gpt-oss": {"expert_bias": True},
    "DeepSeek V2": {**GROUPS, "router": "grouped_softmax", "normalizes_experts": False},
    "DeepSeek V3": {**GROUPS, "router": "biased_sigmoid"},
}


def sparse_layer(dtype=DTYPE, **changes):
    """A layer of random weights."""
    shape = {"vocab_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_size": 16}
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_experts": 12, "num_experts_per_token": 3}
    torch.manual_seed(0)
    mlp = SparseMLP(Architecture(**{**shape, **sizes, "expert_size": 64, **changes})).requires_grad_(False)
    mlp = mlp.to(DEVICE, dtype)
    if mlp.score_bias is not None:
        bias = torch.randn(len(mlp.gate.weight), device=DEVICE) / 4
        mlp.score_bias = torch.nn.Parameter(bias, requires_grad=False)
    return mlp


def relative_difference(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("kind", ["none", "int8", "fp8", "int4"])
@pytest.mark.parametrize("num_rows", [1, 2, 20, 90])
def test_experts(num_rows, kind, monkeypatch):
    if DEVICE.type == "cpu" and kind == "fp8":
        pytest.skip("the interpreter does not know 8-bit floating point numbers")
    monkeypatch.setattr(expert_tiles, "SEARCHED", (16, 64))
    mlp = sparse_layer()
    if kind != "none":
        for leaf in ("gate_up_proj", "down_proj"):
            quantize_experts(
                mlp.experts, f"experts.{leaf}", QuantizationSettings(kind=kind, group_size=32), quantized_layer
            )
    assert can_compute_experts(mlp.experts)
    x = torch.randn(num_rows, 96, device=DEVICE).to(DTYPE)
    weights, chosen = mlp.choose(x)
    expected = mlp.experts.compute_each(x, chosen, weights)
    found = kernel_experts(mlp.experts)(x, chosen.int(), weights.float())
    found = found.sum(0) if found.dim() == 3 else found
    assert relative_difference(found, expected) < (0.01 if DEVICE.type == "cuda" else 1e-5)


@pytest.mark.parametrize("early", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "changes"), [("none", {}), ("none", {"expert_bias": True}), ("int8", {}), ("fp8", {})]
)
def test_weights_that_are_read_before_the_inputs(kind, changes, early, monkeypatch):
    if DEVICE.type == "cpu" and kind == "fp8":
        pytest.skip("the interpreter does not know 8-bit floating point numbers")
    shape = (2, 16, early, 1)  # outputs, inputs at a time, blocks, warps
    monkeypatch.setattr(experts, "early_shape", lambda *_: shape)
    mlp = sparse_layer(expert_size=72, **changes)  # the last block is not whole
    if kind != "none":
        quantize_experts(mlp.experts, "experts.down_proj", QuantizationSettings(kind=kind), quantized_layer)
    x = torch.randn(1, 96, device=DEVICE).to(DTYPE)
    weights, chosen = mlp.choose(x)
    expected = mlp.experts.compute_each(x, chosen, weights)
    found = kernel_experts(mlp.experts)(x, chosen.int(), weights.float())
    assert relative_difference(found, expected) < (0.01 if DEVICE.type == "cuda" else 1e-5)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name, num_rows, monkeypatch):
    monkeypatch.setattr(router, "PROGRAMS", 12)  # five rows have two programs each
    mlp = sparse_layer(torch.float32, **ROUTERS[name])
    assert can_route(mlp)
    x, sums = torch.randn(num_rows, 96, device=DEVICE), torch.randn(2, num_rows, 96, device=DEVICE)
    gain = torch.rand(96, device=DEVICE)
    expected = x.clone()
    y = normalize(expected, gain, 1e-5, sums, 0.5)
    weights, chosen = mlp.choose(y)
    counters = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    routed = route(x, sums, gain, 1e-5, mlp, counters, 0.5)
    torch.testing.assert_close(routed.x_TE, expected)
    torch.testing.assert_close(routed.y_TE, y)
    assert routed.chosen_TA.tolist() == chosen.tolist()
    torch.testing.assert_close(routed.weights_TA, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts_beyond_the_best_groups_weigh_nothing(num_rows):
    """A row has more experts than the best groups have."""
    changes = {"num_experts_per_token": 6, "num_chosen_groups": 1, "normalizes_experts": False}
    mlp = sparse_layer(torch.float32, **{**GROUPS, "router": "grouped_softmax", **changes})
    x = torch.randn(num_rows, 96, device=DEVICE)
    gain = torch.ones(96, device=DEVICE)
    weights, _ = mlp.choose(normalize(x.clone(), gain, 1e-5))
    counters = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    routed = route(x, None, gain, 1e-5, mlp, counters)
    assert (weights == 0.0).any(dim=1).all()
    torch.testing.assert_close(routed.weights_TA, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which the interpreter uses
def test_rows_that_are_not_numbers_choose_different_experts_and_leave_others_alone():
    mlp = sparse_layer(torch.float32)
    x = torch.randn(3, 96, device=DEVICE)
    x[1] = torch.nan
    counters = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    routed = route(x, None, torch.ones(96, device=DEVICE), 1e-5, mlp, counters)
    assert len(set(routed.chosen_TA[1].tolist())) == 3
    assert 0 <= routed.chosen_TA.min() <= routed.chosen_TA.max() < 12
    y = kernel_experts(mlp.experts)(routed.y_TE, routed.chosen_TA, routed.weights_TA).sum(0)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("num_experts", "num_groups"), [(12, 4), (16, 16), (18, 3)])
def test_groups_that_are_no_powers_of_two_or_have_one_expert_are_chosen_by_plain_pytorch(num_experts, num_groups):
    parts = {"router": "grouped_softmax", "num_expert_groups": num_groups, "num_chosen_groups": 2}
    assert not can_route(sparse_layer(num_experts=num_experts, **parts))


def test_scores_of_one_row_are_computed_by_one_program_each():
    assert experts_of_a_program(128, 1) == 1
    assert experts_of_a_program(128, 32) == 16
    assert experts_of_a_program(8, 64) == 2
