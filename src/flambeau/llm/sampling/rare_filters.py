"""Filters that few requests ask for: top-n-sigma, typical-p and XTC. They read all scores, in plain PyTorch.

Shapes: S sequences · W places of each · V vocabulary · settings are [S, 1, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.sampling import rng
from flambeau.llm.sampling_params import SamplingParams


def has_rare_filters(params: SamplingParams) -> bool:
    if params.is_greedy:
        return False
    return params.typical_p < 1 or params.top_n_sigma > 0 or params.xtc_probability > 0


@dataclass(frozen=True, slots=True)
class RareFilters:
    """The settings of several sequences; None: no sequence has one."""

    keys_S1: Tensor
    top_n_sigma: Tensor | None
    typical_p: Tensor | None
    xtc_probability: Tensor | None
    xtc_threshold: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], keys_S1: Tensor) -> RareFilters:
        def column(values: list[float], *, is_used: bool = True) -> Tensor | None:
            return torch.tensor(values, device=keys_S1.device).float().view(-1, 1, 1) if is_used else None

        sigmas = [max(p.top_n_sigma, 0.0) for p in params]
        thresholds = column([p.xtc_threshold for p in params])
        assert thresholds is not None
        return cls(
            keys_S1,
            column(sigmas, is_used=any(sigmas)),
            column([p.typical_p for p in params], is_used=any(p.typical_p < 1 for p in params)),
            column([p.xtc_probability for p in params], is_used=any(p.xtc_probability for p in params)),
            thresholds,
        )

    def before(self, logits_SWV: Tensor) -> Tensor:
        """Before all other filters; a copy, if they change."""
        return logits_SWV if self.top_n_sigma is None else within_sigmas(logits_SWV, self.top_n_sigma)

    def after(self, scores_SWV: Tensor, positions_SW: Tensor) -> Tensor:
        """After all other filters."""
        if self.typical_p is not None:
            scores_SWV = typical(scores_SWV, self.typical_p)
        if self.xtc_probability is not None:
            tokens = positions_SW.new_zeros(1)
            happens = rng.uniform(self.keys_S1, positions_SW, tokens, rng.EXCLUDE) < self.xtc_probability
            scores_SWV = torch.where(happens, without_top_choices(scores_SWV, self.xtc_threshold), scores_SWV)
        return scores_SWV


def within_sigmas(logits_SWV: Tensor, sigmas: Tensor) -> Tensor:
    """-inf for tokens further from the best one than so many standard deviations of the possible tokens; 0: for none.

    Tokens that are not finite have no part in it.
    """
    is_possible = logits_SWV.isfinite()
    count = is_possible.sum(-1, keepdim=True)
    mean = logits_SWV.where(is_possible, 0.0).sum(-1, keepdim=True) / count
    variance = (logits_SWV - mean).where(is_possible, 0.0).square().sum(-1, keepdim=True) / count
    lowest = logits_SWV.amax(-1, keepdim=True) - sigmas * variance.sqrt()
    return logits_SWV.masked_fill((logits_SWV < lowest) & (sigmas > 0), -torch.inf)


def typical(scores_SWV: Tensor, typical_p: Tensor) -> Tensor:
    """-inf for all but the tokens nearest to the expected surprise that together have this probability; 1: for none.

    Tokens as near as the last one that passes also pass.
    """
    logs = F.log_softmax(scores_SWV, -1)
    probabilities = logs.exp()
    expected = -(logs * probabilities).nansum(-1, keepdim=True)
    distance = (-logs - expected).abs()
    ascending, order = distance.sort(-1)
    cumulative = probabilities.gather(-1, order).cumsum(-1)
    last = (cumulative < typical_p).sum(-1, keepdim=True).clamp_(max=scores_SWV.shape[-1] - 1)
    is_out = (distance > ascending.gather(-1, last)) & (typical_p < 1)
    return scores_SWV.masked_fill(is_out, -torch.inf)


def without_top_choices(scores_SWV: Tensor, threshold: Tensor) -> Tensor:
    """-inf for the tokens with at least this probability, but for the least likely of them."""
    probabilities = F.softmax(scores_SWV, -1)
    is_top = probabilities >= threshold
    least = probabilities.masked_fill(~is_top, torch.inf).amin(-1, keepdim=True)
    return scores_SWV.masked_fill(is_top & (probabilities > least), -torch.inf)
