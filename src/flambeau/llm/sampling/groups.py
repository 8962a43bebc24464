"""Groups of rows whose scores are computed alike: a row's settings decide its group, whatever else is in the batch.

Shapes: S rows · W places of each row · V vocabulary · C candidates · per-row settings are [S, 1, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from flambeau.llm.sampling.few import FewDraws
from flambeau.llm.sampling.filters import FEW, Filter, in_order, largest
from flambeau.llm.sampling.rows import Row
from flambeau.llm.sampling_params import SamplingParams

COLDEST = 1e-30  # as good as greedy; below it, logits leave the range of numbers


class Kind(Enum):
    """How far tokens must be sorted."""

    GREEDY = "the best token alone"
    ALL = "every token, or those within reach of the best: no sorting"
    FEW = "a small top-k: the rest is done to the candidates alone"
    MANY = "top-p, or a large top-k: all scores are sorted"


class Group:
    """The rows of one kind: which they are, and their settings as tensors."""

    def __init__(
        self, kind: Kind, rows: Sequence[Row], index_S: Tensor | None, vocab_size: int, device: torch.device
    ) -> None:
        self.index_S = index_S  # None: all rows of the batch
        self._kind, self._device = kind, device
        self.keys_S1 = torch.tensor([[row.key] for row in rows], device=device)
        params = [row.params for row in rows]
        self._temperature = self._column([max(p.temperature, COLDEST) for p in params])
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        self._filter = Filter(
            top_k=self._column(top_k, torch.long) if min(top_k) < vocab_size else None,
            top_p=self._column([p.top_p for p in params]) if min(p.top_p for p in params) < 1 else None,
            log_min_p=self._column([p.min_p for p in params]).log() if max(p.min_p for p in params) > 0 else None,
        )

        is_small = kind is Kind.FEW and device.type == "cpu"
        self.few = FewDraws(self.keys_S1, self._temperature, self._filter) if is_small else None

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken each time."""
        return self._kind is Kind.GREEDY

    def part(self, batch: Tensor) -> Tensor:
        """What a tensor of the whole batch [S, …] says about these rows."""
        return batch if self.index_S is None else batch[self.index_S]

    def candidates(self, logits_SWV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores [S, W, C] of the tokens that may be drawn, minus infinity for others, and their ids; None: all."""
        if self._kind is Kind.FEW:
            values, ids = largest(logits_SWV, min(FEW, logits_SWV.shape[-1]))
            return self._filtered(values), ids
        return self._filtered(logits_SWV), None

    def scores(self, logits_SWV: Tensor) -> Tensor:
        """Scores [S, W, V] of all tokens."""
        if self.is_greedy:
            return logits_SWV
        scores, ids = self.candidates(logits_SWV)
        if ids is None:
            return scores
        return torch.full_like(logits_SWV, -torch.inf).scatter_(-1, ids, scores)

    def _filtered(self, logits_SWC: Tensor) -> Tensor:
        scores = logits_SWC / self._temperature
        if self._kind is Kind.ALL:
            if self._filter.log_min_p is None:
                return scores
            return scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + self._filter.log_min_p, -torch.inf)
        return scores.masked_fill_(scores < self._filter.threshold(in_order(scores)), -torch.inf)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, device=self._device, dtype=dtype).view(-1, 1, 1)


def kind_of(params: SamplingParams, vocab_size: int) -> Kind:
    """The group that a request's settings belong to."""
    if params.is_greedy:
        return Kind.GREEDY
    if 0 < params.top_k <= FEW and params.top_k < vocab_size:
        return Kind.FEW
    if params.top_p < 1 or 0 < params.top_k < vocab_size:
        return Kind.MANY
    return Kind.ALL


def grouped(rows: Sequence[Row], vocab_size: int, device: torch.device) -> list[Group]:
    """The groups of a batch, each with the places of its rows."""
    members: dict[Kind, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(kind_of(row.params, vocab_size), []).append(i)
    if len(members) == 1:
        return [Group(next(iter(members)), rows, None, vocab_size, device)]
    return [
        Group(kind, [rows[i] for i in places], torch.tensor(places, device=device), vocab_size, device)
        for kind, places in members.items()
    ]


def merged(groups: Sequence[Group], pieces: Sequence[Tensor]) -> Tensor:
    """What was computed for each group, as one tensor in the order of the batch."""
    if len(groups) == 1:
        return pieces[0]
    whole = pieces[0].new_empty(sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
    for group, piece in zip(groups, pieces, strict=True):
        whole[group.index_S] = piece
    return whole
