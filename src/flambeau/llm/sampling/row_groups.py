"""Groups of sequences whose scores are computed alike. A sequence's own settings decide its group.

Shapes: S sequences · W places of each · V vocabulary · C candidates · settings are [S, 1, 1]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.filters import SMALL_TOP_K, TokenFilter, TopKDraws, largest, sort_ascending
from flambeau.llm.sampling.rare_filters import RareFilters, has_rare_filters
from flambeau.llm.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-30  # as good as greedy; below it, logits overflow


class SamplingMethod(Enum):
    """How far the tokens must be sorted."""

    GREEDY = "the best token only"
    UNSORTED = "every token, or those within min-p of the best"
    SMALL_TOP_K = "a few candidates, then everything else on those"
    SORTED = "top-p, or a large top-k: all scores are sorted"
    FURTHER = "every filter, those that few requests ask for among them"


class SamplingGroup:
    """The sequences of one method, and their settings as tensors."""

    def __init__(
        self,
        method: SamplingMethod,
        states: Sequence[SamplingState],
        index_S: Tensor | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.index_S = index_S  # None: all sequences of the batch
        self._method, self._device = method, device
        self.keys_S1 = torch.tensor([[state.key] for state in states], device=device)
        params = [state.params for state in states]
        self._temperature = self._column([max(p.temperature, MIN_TEMPERATURE) for p in params])
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        self._filter = TokenFilter(
            top_k=self._column(top_k, torch.long) if min(top_k) < vocab_size else None,
            top_p=self._column([p.top_p for p in params]) if min(p.top_p for p in params) < 1 else None,
            log_min_p=self._column([p.min_p for p in params]).log() if max(p.min_p for p in params) > 0 else None,
        )
        uses_numpy = method is SamplingMethod.SMALL_TOP_K and device.type == "cpu"
        self._further = RareFilters.of(params, self.keys_S1) if method is SamplingMethod.FURTHER else None
        self.top_k_draws = TopKDraws(self.keys_S1, self._temperature, self._filter) if uses_numpy else None

    @property
    def is_greedy(self) -> bool:
        return self._method is SamplingMethod.GREEDY

    @property
    def has_further(self) -> bool:
        """Whether it has filters that no backend knows."""
        return self._further is not None

    def part(self, batch: Tensor) -> Tensor:
        """The rows of these sequences in a tensor of the whole batch [S, …]."""
        return batch if self.index_S is None else batch[self.index_S]

    def candidates(self, logits_SWV: Tensor, positions_SW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores [S, W, C] of the candidates, -inf for those filtered out, and their ids; None: the vocabulary."""
        if self._further is not None:
            scores = self._filtered(self._further.before(logits_SWV))
            return self._further.after(scores, positions_SW), None
        if self._method is SamplingMethod.SMALL_TOP_K:
            values, ids = largest(logits_SWV, min(SMALL_TOP_K, logits_SWV.shape[-1]))
            return self._filtered(values), ids
        return self._filtered(logits_SWV), None

    def scores(self, logits_SWV: Tensor, positions_SW: Tensor) -> Tensor:
        """Scores [S, W, V] of all tokens."""
        if self.is_greedy:
            return logits_SWV
        scores, ids = self.candidates(logits_SWV, positions_SW)
        if ids is None:
            return scores
        return torch.full_like(logits_SWV, -torch.inf).scatter_(-1, ids, scores)

    def _filtered(self, logits_SWC: Tensor) -> Tensor:
        scores = logits_SWC / self._temperature
        if self._method is SamplingMethod.UNSORTED:
            if self._filter.log_min_p is None:
                return scores
            return scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + self._filter.log_min_p, -torch.inf)
        if self._filter.is_empty:
            return scores
        return scores.masked_fill_(scores < self._filter.threshold(sort_ascending(scores)), -torch.inf)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, device=self._device, dtype=dtype).view(-1, 1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class RowSettings:
    """The settings of a batch as arrays, for a backend that samples by itself."""

    NUMBERS: ClassVar = ("temperature", "top_k", "top_p", "log_min_p")

    keys_S: NDArray[np.int64]
    numbers: NDArray[np.float32]  # a row for each of NUMBERS; the temperature 0 stands for the best token
    is_constrained: bool = False  # masks say which tokens may be chosen, once the tokens before are known

    @classmethod
    def of(cls, states: Sequence[SamplingState], vocab_size: int) -> RowSettings:
        params = [state.params for state in states]
        numbers = [
            [0.0 if p.is_greedy else max(p.temperature, MIN_TEMPERATURE) for p in params],
            [min(p.top_k or vocab_size, vocab_size) for p in params],
            [p.top_p for p in params],
            [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
        ]
        is_constrained = any(state.grammar is not None for state in states)
        return cls(np.array([state.key for state in states]), np.array(numbers, np.float32), is_constrained)


def sampling_method(params: SamplingParams, vocab_size: int) -> SamplingMethod:
    if params.is_greedy:
        return SamplingMethod.GREEDY
    if has_rare_filters(params):
        return SamplingMethod.FURTHER
    if 0 < params.top_k <= SMALL_TOP_K and params.top_k < vocab_size:
        return SamplingMethod.SMALL_TOP_K
    if params.top_p < 1 or 0 < params.top_k < vocab_size:
        return SamplingMethod.SORTED
    return SamplingMethod.UNSORTED


def group_states(states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> list[SamplingGroup]:
    """The groups of a batch."""
    members: dict[SamplingMethod, list[int]] = {}
    for i, state in enumerate(states):
        members.setdefault(sampling_method(state.params, vocab_size), []).append(i)
    if len(members) == 1:
        return [SamplingGroup(next(iter(members)), states, None, vocab_size, device)]
    return [
        SamplingGroup(method, [states[i] for i in places], torch.tensor(places, device=device), vocab_size, device)
        for method, places in members.items()
    ]


def merge_groups(groups: Sequence[SamplingGroup], parts: Sequence[Tensor]) -> Tensor:
    """The results of all groups as one tensor, in the order of the batch."""
    if len(groups) == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    for group, part in zip(groups, parts, strict=True):
        whole[group.index_S] = part
    return whole
