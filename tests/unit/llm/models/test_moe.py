"""Experts: three ways to compute them, one result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from flambeau.llm.models.moe import SparseMLP
from support.tiny_models import ARCH

MOE = replace(ARCH, num_experts=6, num_experts_per_token=2, expert_size=24)


def some_experts(**changes: object) -> SparseMLP:
    torch.manual_seed(0)
    return SparseMLP(replace(MOE, **changes)).requires_grad_(False)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40])
def test_all_ways_to_compute_experts_agree(num_tokens):
    experts = some_experts().experts
    x = torch.randn(num_tokens, MOE.hidden_size)
    weights, chosen = torch.rand(num_tokens, MOE.num_experts).topk(2)
    expected = experts.compute_each(x, chosen, weights)
    torch.testing.assert_close(experts.compute_gathered(x, chosen, weights), expected)
    torch.testing.assert_close(experts.compute_all(x, chosen, weights), expected)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_experts_without_weights_give_their_inputs(num_tokens):
    mlp = some_experts(num_zero_experts=3, num_experts_per_token=4, router="biased_softmax", normalizes_experts=False)
    x = torch.randn(num_tokens, MOE.hidden_size)
    weights, chosen = mlp.choose(x)
    assert (chosen >= MOE.num_experts).any()
    expected = mlp.experts.compute_each(x, chosen, weights)
    torch.testing.assert_close(mlp.experts.compute_gathered(x, chosen, weights), expected)
    torch.testing.assert_close(mlp.experts.compute_all(x, chosen, weights), expected)
    given = (weights * (chosen >= MOE.num_experts)).sum(-1, keepdim=True) * x
    torch.testing.assert_close(mlp(x), expected + given)


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_token_gets_the_weighted_sum_of_its_experts(normalizes):
    mlp = some_experts(normalizes_experts=normalizes)
    x = torch.randn(MOE.hidden_size)
    likely = mlp.gate(x).softmax(-1)
    best = likely.argsort(descending=True)[:2].tolist()
    scale = 1 / sum(likely[e] for e in best) if normalizes else 1.0
    said = []
    for e in best:
        gate, up = (mlp.experts.gate_up_proj[e] @ x).chunk(2)
        said.append(likely[e] * scale * (mlp.experts.down_proj[e] @ (F.silu(gate) * up)))
    torch.testing.assert_close(mlp(x.unsqueeze(0))[0], sum(said))


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_traced_shapes_do_not_depend_on_what_tokens_choose(num_tokens):
    mlp = some_experts()
    torch._dynamo.reset()
    traced = torch.compile(mlp, backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(num_tokens, MOE.hidden_size)
        torch.testing.assert_close(traced(x), mlp(x))


def test_any_leading_dimensions_are_kept():
    mlp = some_experts()
    x = torch.randn(2, 3, MOE.hidden_size)
    torch.testing.assert_close(mlp(x).flatten(0, 1), mlp(x.flatten(0, 1)))


def test_narrow_types_stay_narrow_beside_weights_in_float32():
    with torch.device("meta"):  # some machines cannot multiply bfloat16
        experts = SparseMLP(MOE).to(torch.bfloat16).experts
        x = torch.randn(3, MOE.hidden_size, dtype=torch.bfloat16)
        weights, chosen = torch.rand(3, MOE.num_experts).topk(2)
        assert {way(x, chosen, weights).dtype for way in (experts.compute_gathered, experts.compute_all)} == {
            torch.bfloat16
        }
