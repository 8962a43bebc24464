"""Routers: which experts compute a token, and with which weights.

Shapes: T tokens · N experts · A experts of a token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture, RouterKind

Routing = tuple[Tensor, Tensor]  # the weights [T, A] of the chosen experts, and their numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What a router's choice depends on, beside the scores."""

    num_chosen: int
    num_groups: int  # experts are chosen from the best groups only …
    num_chosen_groups: int  # … of which there are so many
    jitter: float  # of a sparse mixer

    @classmethod
    def of(cls, arch: Architecture) -> RouterSettings:
        return cls(
            num_chosen=arch.num_experts_per_token,
            num_groups=arch.num_expert_groups,
            num_chosen_groups=arch.num_chosen_groups,
            jitter=arch.router_jitter,
        )


def softmax(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The experts with the largest weights."""
    weights_TA, chosen_TA = logits_TN.float().softmax(dim=-1).topk(settings.num_chosen, dim=-1)
    return weights_TA, chosen_TA


def grouped_softmax(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The same, from the groups with the largest weight (DeepSeek V2)."""
    weights_TN = logits_TN.float().softmax(dim=-1)
    if settings.num_groups > 1:
        best = torch.unflatten(weights_TN, 1, (settings.num_groups, -1)).amax(dim=-1)
        weights_TN = weights_TN.masked_fill(~in_best_groups(best, weights_TN, settings), 0.0)
    weights_TA, chosen_TA = weights_TN.topk(settings.num_chosen, dim=-1)
    return weights_TA, chosen_TA


def biased_softmax(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The experts with the largest sums of weight and bias (Ernie 4.5)."""
    assert bias_N is not None
    weights_TN = logits_TN.float().softmax(dim=-1)
    chosen_TA = (weights_TN + bias_N).topk(settings.num_chosen, dim=-1)[1]
    return weights_TN.gather(1, chosen_TA), chosen_TA


def biased_sigmoid(
    logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings, others: float = -torch.inf
) -> Routing:
    """Experts are weighed one by one, and chosen with a bias that is no part of the weights (DeepSeek V3, GLM-4.5)."""
    assert bias_N is not None
    weights_TN = logits_TN.float().sigmoid()
    scores_TN = weights_TN + bias_N
    if settings.num_groups > 1:
        best = torch.unflatten(scores_TN, 1, (settings.num_groups, -1)).topk(2, dim=-1)[0].sum(dim=-1)
        scores_TN = scores_TN.masked_fill(~in_best_groups(best, scores_TN, settings), others)
    chosen_TA = scores_TN.topk(settings.num_chosen, dim=-1)[1]
    return weights_TN.gather(1, chosen_TA), chosen_TA


def zeroed_sigmoid(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The same with scores of 0 in other groups, which are chosen before those below 0 (A.X-K2)."""
    return biased_sigmoid(logits_TN, bias_N, settings, others=0.0)


def biased_sqrt_softplus(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The same with weights that are roots of a soft maximum with 0, without groups (DeepSeek V4)."""
    assert bias_N is not None
    weights_TN = root_softplus(logits_TN)
    chosen_TA = (weights_TN + bias_N).topk(settings.num_chosen, dim=-1)[1]
    return weights_TN.gather(1, chosen_TA), chosen_TA


def root_softplus(logits: Tensor) -> Tensor:
    return F.softplus(logits.float()).sqrt()


def in_best_groups(scores: Tensor, all_TN: Tensor, settings: RouterSettings) -> Tensor:
    """Which experts [T, N] are in the best groups, by the scores [T, groups] of these."""
    best = scores.topk(settings.num_chosen_groups, dim=-1)[1]
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
    return is_chosen.repeat_interleave(all_TN.shape[1] // settings.num_groups, dim=1)


def sigmoid(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The experts with the largest scores, weighed one by one (Llama 4)."""
    scores_TA, chosen_TA = logits_TN.topk(settings.num_chosen, dim=-1)
    return scores_TA.float().sigmoid(), chosen_TA


def late_sigmoid(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """The same, chosen by the sums of score and bias (Kolibri 1)."""
    assert bias_N is not None
    chosen_TA = (logits_TN.float() + bias_N).topk(settings.num_chosen, dim=-1)[1]
    return logits_TN.float().gather(1, chosen_TA).sigmoid(), chosen_TA


def sparse_mixer(logits_TN: Tensor, bias_N: Tensor | None, settings: RouterSettings) -> Routing:
    """One expert after another; each is weighed against those close to it that are left (Phi-3.5-MoE)."""
    left_TN, weights, chosen = logits_TN, [], []
    for _ in range(settings.num_chosen):
        best_T1, number_T1 = left_TN.max(dim=-1, keepdim=True)
        distance_TN = (best_T1 - logits_TN) / logits_TN.abs().clamp(min=best_T1)
        close_TN = left_TN.masked_fill(distance_TN > 2 * settings.jitter, -torch.inf)
        weights.append(close_TN.softmax(dim=-1).gather(1, number_T1))
        chosen.append(number_T1)
        left_TN = left_TN.scatter(1, number_T1, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


ROUTERS: dict[RouterKind, Callable[[Tensor, Tensor | None, RouterSettings], Routing]] = {
    "softmax": softmax,
    "grouped_softmax": grouped_softmax,
    "biased_softmax": biased_softmax,
    "biased_sigmoid": biased_sigmoid,
    "zeroed_sigmoid": zeroed_sigmoid,
    "biased_sqrt_softplus": biased_sqrt_softplus,
    "sigmoid": sigmoid,
    "wide_sigmoid": sigmoid,
    "late_sigmoid": late_sigmoid,
    "sparse_mixer": sparse_mixer,
}
# Scores in float32 whatever the type of the network: they decide between experts that are close.
WIDE: frozenset[RouterKind] = frozenset(
    {
        "grouped_softmax",
        "biased_softmax",
        "biased_sigmoid",
        "zeroed_sigmoid",
        "biased_sqrt_softplus",
        "wide_sigmoid",
        "late_sigmoid",
    }
)
BIASED: frozenset[RouterKind] = frozenset(
    {"biased_softmax", "biased_sigmoid", "zeroed_sigmoid", "biased_sqrt_softplus", "late_sigmoid"}
)
