"""Sampler: logits to tokens, each row by its own settings.

What a row gets depends on its own logits, settings, seed and position and on nothing else in the batch.

Shapes: S rows · W places of each row: one, or several where proposed tokens are verified · V vocabulary · C candidates
· A tokens proposed ahead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.sampling import noise
from flambeau.llm.sampling.groups import Group, grouped, merged
from flambeau.llm.sampling.penalties import Counts, Edits
from flambeau.llm.sampling.rows import Row

PLANS_KEPT = 8  # sets of rows that take turns: prompts, decoding, those whose proposals are verified
NO_TOKEN = -1  # a row whose logits are no numbers, or leave nothing to choose from


class Sampler:
    """Chooses tokens; remembers what it worked out about the rows it saw last."""

    def __init__(self, vocab_size: int, *, eos_ids: Sequence[int] = (), device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._counts = Counts(vocab_size, self.device)
        self._tokens_V = torch.arange(vocab_size, device=self.device)
        self._plans: list[_Plan] = []

    def sample(
        self, logits_SWV: Tensor, rows: Sequence[Row], *, ahead_SA: Tensor | None = None, offset: int = 0
    ) -> Tensor:
        """A token for every place [S, W], or NO_TOKEN.

        Place w of a row comes after its output and the first `offset + w` of the tokens ahead of it.
        """
        plan = self._plan(rows)
        logits_SWV = plan.edits.apply(logits_SWV, ahead_SA, offset)
        if plan.is_greedy:
            return chosen(logits_SWV)
        positions_SW = self.positions(rows, logits_SWV.shape[1], offset)
        pieces = [self._draw(group, group.part(logits_SWV), group.part(positions_SW)) for group in plan.groups]
        return merged(plan.groups, pieces)

    def scores(
        self, logits_SWV: Tensor, rows: Sequence[Row], *, ahead_SA: Tensor | None = None, offset: int = 0
    ) -> Tensor:
        """Log-probabilities [S, W, V] up to a constant of what `sample` draws from; minus infinity: never."""
        plan = self._plan(rows)
        logits_SWV = plan.edits.apply(logits_SWV, ahead_SA, offset)
        return merged(plan.groups, [group.scores(group.part(logits_SWV)) for group in plan.groups])

    def draw(self, scores_SWV: Tensor, rows: Sequence[Row], *, offset: int = 0) -> Tensor:
        """The tokens [S, W] that `sample` chooses, from their scores."""
        plan = self._plan(rows)
        if plan.is_greedy:
            return chosen(scores_SWV)
        positions_SW = self.positions(rows, scores_SWV.shape[1], offset)
        noise_SWV = noise.gumbel(self.keys(rows).unsqueeze(1), positions_SW, self._tokens_V, noise.DRAW)
        for group in plan.groups:
            if group.is_greedy:
                noise_SWV[group.index_S] = 0.0
        return chosen(noise_SWV.add_(scores_SWV))

    def takes_likeliest(self, rows: Sequence[Row]) -> bool:
        """Whether `sample` gives every row the token with the largest of its logits as they are."""
        return self._plan(rows).takes_likeliest

    def keys(self, rows: Sequence[Row]) -> Tensor:
        """Where the random numbers of each row begin [S]."""
        return self._plan(rows).keys_S

    def positions(self, rows: Sequence[Row], places: int, offset: int = 0) -> Tensor:
        """Where the tokens of every place go [S, W]."""
        first = torch.tensor([len(row.tokens) + offset for row in rows], device=self.device).unsqueeze(1)
        return first if places == 1 else first + torch.arange(places, device=self.device)

    def _draw(self, group: Group, logits_SWV: Tensor, positions_SW: Tensor) -> Tensor:
        if group.is_greedy:
            return chosen(logits_SWV)
        if group.few is not None:
            value_SW, token_SW = group.few.draw(logits_SWV.numpy(), positions_SW.numpy())
            return torch.from_numpy(np.where(np.isfinite(value_SW), token_SW, NO_TOKEN))
        scores, ids = group.candidates(logits_SWV)
        noise_SWC = noise.gumbel(group.keys_S1, positions_SW, self._tokens_V if ids is None else ids, noise.DRAW)
        return chosen(scores + noise_SWC, ids)

    def _plan(self, rows: Sequence[Row]) -> _Plan:
        rows = list(rows)
        for plan in self._plans:
            if plan.rows == rows:  # the very same objects, in the same order
                return plan
        groups = grouped(rows, self._vocab_size, self.device)
        keys_S = torch.tensor([row.key for row in rows], device=self.device)
        plan = _Plan(rows, groups, Edits(rows, self._counts, self._eos_ids, self.device), keys_S)
        self._plans = [plan, *self._plans[: PLANS_KEPT - 1]]
        return plan


@dataclass(slots=True)
class _Plan:
    """What stays the same from step to step while the rows do."""

    rows: list[Row]
    groups: list[Group]
    edits: Edits
    keys_S: Tensor

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its most likely token."""
        return len(self.groups) == 1 and self.groups[0].is_greedy

    @property
    def takes_likeliest(self) -> bool:
        """Whether that is the token with the largest logit, too."""
        return self.edits.are_none and self.is_greedy


def chosen(values_SWC: Tensor, ids_SWC: Tensor | None = None) -> Tensor:
    """The token [S, W] with the largest value, the first of equal ones; NO_TOKEN where that is no number."""
    if values_SWC.device.type == "cpu" and ids_SWC is None:  # numpy's are many times as fast
        array = values_SWC.numpy()
        return torch.from_numpy(np.where(np.isfinite(array.max(-1)), array.argmax(-1), NO_TOKEN))
    value, place = values_SWC.max(-1)
    if ids_SWC is not None:
        place = ids_SWC.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return torch.where(value.isfinite(), place, NO_TOKEN)
