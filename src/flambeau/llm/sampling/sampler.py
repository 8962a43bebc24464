"""Sampler: logits → tokens, by each request's own settings.

What a sequence gets depends on its own logits, settings, seed and position, and on nothing else in the batch.

Shapes: S sequences · W places of each: one, or several when proposed tokens are verified · V vocabulary · C candidates
· A tokens proposed ahead · M tokens with log-probabilities · B words of 32 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.core.outputs import NO_TOKEN, TokenInfo
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling import rng
from flambeau.llm.sampling.grammar_masks import Bits, GrammarMasks
from flambeau.llm.sampling.logits_processors import LogitsProcessors, TokenCounts, argmax_tokens
from flambeau.llm.sampling.row_groups import RowSettings, SamplingGroup, group_states, merge_groups

MAX_BATCHES = 8  # batches that alternate: prompts, decoding, verified proposals


class Sampler:
    """Chooses tokens; keeps the tensors of the batches it saw last."""

    def __init__(self, vocab_size: int, *, eos_ids: Sequence[int] = (), device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._vocab_size = vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._counts = TokenCounts(vocab_size, self.device)
        self._masks = GrammarMasks(vocab_size)
        self._tokens_V = torch.arange(vocab_size, device=self.device)
        self._batches: list[_SamplingBatch] = []

    def sample(
        self, logits_SWV: Tensor, states: Sequence[SamplingState], *, ahead_SA: Tensor | None = None, offset: int = 0
    ) -> Tensor:
        """A token for every place [S, W], or NO_TOKEN.

        Place w comes after the sequence's tokens and the first `offset + w` of the tokens ahead.
        """
        batch = self._batch(states)
        if batch.is_greedy:
            return batch.processors.argmax(logits_SWV, ahead_SA, offset)
        logits_SWV = batch.processors.apply(logits_SWV, ahead_SA, offset)
        positions_SW = self.positions(states, logits_SWV.shape[1], offset)
        parts = [self._draw(group, group.part(logits_SWV), group.part(positions_SW)) for group in batch.groups]
        return merge_groups(batch.groups, parts)

    def scores(
        self, logits_SWV: Tensor, states: Sequence[SamplingState], *, ahead_SA: Tensor | None = None, offset: int = 0
    ) -> Tensor:
        """Log-probabilities [S, W, V], up to a constant, that `sample` draws from; -inf: never."""
        batch = self._batch(states)
        logits_SWV = batch.processors.apply(logits_SWV, ahead_SA, offset)
        positions_SW = self.positions(states, logits_SWV.shape[1], offset)
        parts = [group.scores(group.part(logits_SWV), group.part(positions_SW)) for group in batch.groups]
        return merge_groups(batch.groups, parts)

    def draw(self, scores_SWV: Tensor, states: Sequence[SamplingState], *, offset: int = 0) -> Tensor:
        """The tokens [S, W] that `sample` chooses, given their scores."""
        batch = self._batch(states)
        if batch.is_greedy:
            return argmax_tokens(scores_SWV)
        positions_SW = self.positions(states, scores_SWV.shape[1], offset)
        noise_SWV = rng.gumbel(self.keys(states).unsqueeze(1), positions_SW, self._tokens_V, rng.DRAW)
        for group in batch.groups:
            if group.is_greedy:
                noise_SWV[group.index_S] = 0.0
        return argmax_tokens(noise_SWV.add_(scores_SWV))

    def prepare(self, states: Sequence[SamplingState], ahead: Sequence[Sequence[int]] | None = None) -> None:
        """Start making the masks that `sample` needs for these sequences and tokens ahead, beside a forward pass."""
        self._masks.prepare(states, ahead)

    def takes_argmax(self, states: Sequence[SamplingState]) -> bool:
        """Whether `sample` gives every sequence the argmax of its unchanged logits."""
        return self._batch(states).takes_argmax

    def row_settings(self, states: Sequence[SamplingState]) -> RowSettings | None:
        """The settings for a backend that samples by itself; None if it cannot: masks are the only change it knows.

        The same sequences get the same object.
        """
        return self._batch(states).row_settings

    def masks(self, states: Sequence[SamplingState | None]) -> Bits:
        """Which tokens may come next [S, B], for such a backend; all of them without a grammar, or for None."""
        return self._masks.next_of(states)

    def draw_settings(self, states: Sequence[SamplingState]) -> RowSettings:
        """The settings for tokens that are only proposed: without what changes logits before."""
        return self._batch(states).settings

    def keys(self, states: Sequence[SamplingState]) -> Tensor:
        """Where the random numbers of each sequence begin [S]."""
        return self._batch(states).keys_S

    def positions(self, states: Sequence[SamplingState], places: int, offset: int = 0) -> Tensor:
        """The position of the token at every place [S, W]."""
        first = torch.tensor([len(state.tokens) + offset for state in states], device=self.device).unsqueeze(1)
        return first if places == 1 else first + torch.arange(places, device=self.device)

    def _draw(self, group: SamplingGroup, logits_SWV: Tensor, positions_SW: Tensor) -> Tensor:
        if group.is_greedy:
            return argmax_tokens(logits_SWV)
        if group.top_k_draws is not None:
            value_SW, token_SW = group.top_k_draws.draw(logits_SWV.numpy(), positions_SW.numpy())
            return torch.from_numpy(np.where(np.isfinite(value_SW), token_SW, NO_TOKEN))
        scores, ids = group.candidates(logits_SWV, positions_SW)
        noise_SWC = rng.gumbel(group.keys_S1, positions_SW, self._tokens_V if ids is None else ids, rng.DRAW)
        return argmax_tokens(scores + noise_SWC, ids)

    def _batch(self, states: Sequence[SamplingState]) -> _SamplingBatch:
        states = list(states)
        for batch in self._batches:
            if batch.states == states:  # the same objects in the same order
                return batch
        groups = group_states(states, self._vocab_size, self.device)
        keys_S = torch.tensor([state.key for state in states], device=self.device)
        processors = LogitsProcessors(states, self._counts, self._masks, self._eos_ids, self.device)
        settings = RowSettings.of(states, self._vocab_size)
        batch = _SamplingBatch(states, groups, processors, keys_S, settings)
        self._batches = [batch, *self._batches[: MAX_BATCHES - 1]]
        return batch


@dataclass(slots=True)
class _SamplingBatch:
    """What stays the same from step to step while the sequences do."""

    states: list[SamplingState]
    groups: list[SamplingGroup]
    processors: LogitsProcessors
    keys_S: Tensor
    settings: RowSettings

    @property
    def row_settings(self) -> RowSettings | None:
        has_further = any(group.has_further for group in self.groups)
        return self.settings if self.processors.are_masks and not has_further else None

    @property
    def is_greedy(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].is_greedy

    @property
    def takes_argmax(self) -> bool:
        return self.processors.are_none and self.is_greedy


def token_infos(
    logits_MV: Tensor, ids: Sequence[int], counts: Sequence[int], *, has_ranks: bool = False
) -> list[TokenInfo]:
    """Log-probabilities of tokens and of the `counts` most likely ones, before temperature, penalties and filters."""
    logprobs_MV = F.log_softmax(logits_MV.float(), -1)
    chosen_M1 = logprobs_MV.gather(1, torch.tensor(ids, device=logits_MV.device).unsqueeze(1))
    ranks = (logprobs_MV >= chosen_M1).sum(1).tolist() if has_ranks else [0] * len(ids)
    chosen = chosen_M1.squeeze(1).tolist()
    best = logprobs_MV.topk(min(max(counts), logits_MV.shape[1]))
    tops = [
        tuple(zip(tokens[:count], values[:count], strict=True))
        for tokens, values, count in zip(best.indices.tolist(), best.values.tolist(), counts, strict=True)
    ]
    return [TokenInfo(*each) for each in zip(ids, chosen, tops, ranks, strict=True)]
