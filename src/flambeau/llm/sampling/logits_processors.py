"""Changes to logits before sampling: logit bias, penalties, no end token before `min_tokens`, repetitions and grammars.

Shapes: S sequences · W places of each · V vocabulary · P sequences with penalties · A tokens proposed ahead
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.grammar_masks import Bits, GrammarMasks, best_allowed, mask_logits


class TokenCounts:
    """How often each token occurs in a sequence's output, and whether it is in its prompt; updated token by token."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._outputs = torch.zeros(0, vocab_size, device=device)
        self._prompts = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        # Sequence → its row of the two tensors, and how many of its tokens are counted.
        self._entries: weakref.WeakKeyDictionary[SamplingState, list[int]] = weakref.WeakKeyDictionary()
        self._free: list[int] = []

    def of(self, states: Sequence[SamplingState]) -> tuple[Tensor, Tensor]:
        """Occurrences in the outputs [P, V], and which tokens are in the prompts [P, V]."""
        entries = [self._entries.get(state) or self._open(state) for state in states]
        rows: list[int] = []
        ids: list[int] = []
        for state, entry in zip(states, entries, strict=True):
            new = state.tokens[entry[1] :]
            rows += [entry[0]] * len(new)
            ids += new
            entry[1] += len(new)
        device = self._outputs.device
        if ids:
            places = torch.tensor(rows, device=device), torch.tensor(ids, device=device)
            self._outputs.index_put_(places, torch.ones(len(ids), device=device), accumulate=True)
        wanted = torch.tensor([entry[0] for entry in entries], device=device)
        return self._outputs[wanted], self._prompts[wanted]

    def _open(self, state: SamplingState) -> list[int]:
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._outputs[row] = 0
        self._prompts[row] = False
        self._prompts[row, torch.tensor(state.tokens[: state.num_prompt], device=self._prompts.device)] = True
        self._entries[state] = entry = [row, state.num_prompt]
        weakref.finalize(state, self._free.append, row).atexit = False
        return entry

    def _grow(self) -> None:
        old = len(self._outputs)
        more = max(4, old)
        self._outputs = torch.cat([self._outputs, self._outputs.new_zeros(more, self._outputs.shape[1])])
        self._prompts = torch.cat([self._prompts, self._prompts.new_zeros(more, self._prompts.shape[1])])
        self._free += range(old, old + more)


class LogitsProcessors:
    """The logit changes of a fixed list of sequences."""

    def __init__(
        self,
        states: Sequence[SamplingState],
        counts: TokenCounts,
        masks: GrammarMasks,
        eos_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._counts, self._masks, self._eos_ids, self._device = counts, masks, eos_ids, device
        self._biased = _biases(states, device)
        self._repeating = [(i, state.repeats, state) for i, state in enumerate(states) if state.repeats is not None]
        self._with_min_tokens = [(i, state) for i, state in enumerate(states) if state.params.min_tokens]
        penalized = [(i, state) for i, state in enumerate(states) if state.has_penalties]
        self._penalized = [state for _, state in penalized]
        self._penalized_rows = torch.tensor([i for i, _ in penalized], device=device)
        params = [state.params for state in self._penalized]
        self._repetition = self._column([p.repetition_penalty for p in params])
        self._presence = self._column([p.presence_penalty for p in params])
        self._frequency = self._column([p.frequency_penalty for p in params])
        constrained = [i for i, state in enumerate(states) if state.grammar is not None]
        self._constrained = [states[i] for i in constrained]
        self._constrained_rows = None if len(constrained) == len(states) else torch.tensor(constrained, device=device)
        self._constrained_places = constrained
        changes = self._biased or self._with_min_tokens or self._penalized or self._repeating
        self.are_masks = not changes  # or nothing at all
        self.are_none = self.are_masks and not self._constrained

    def argmax(self, logits_SWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        """The token [S, W] with the largest changed logit, the first of equals; NO_TOKEN if it is not finite."""
        if not self._constrained or logits_SWV.device.type != "cpu" or logits_SWV.dtype != torch.float32:
            return argmax_tokens(self.apply(logits_SWV, ahead_SA, offset))
        if not self.are_masks:
            logits_SWV = self._changed(logits_SWV.clone(), ahead_SA, offset)
        bits = self._bits(logits_SWV.shape[1], ahead_SA, offset)
        return best_allowed(logits_SWV, bits, self._constrained_places)

    def apply(self, logits_SWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        """Changed logits; place w comes after the sequence's tokens and the first `offset + w` of the tokens ahead."""
        if self.are_none:
            return logits_SWV
        if not self.are_masks:
            logits_SWV = self._changed(logits_SWV.clone(), ahead_SA, offset)
        return self._constrain(logits_SWV, ahead_SA, offset) if self._constrained else logits_SWV

    def _changed(self, logits_SWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        """The same tensor, changed."""
        if self._biased:
            rows, ids, values = self._biased
            logits_SWV[rows, :, ids] += values
        self._mask_end_tokens(logits_SWV, offset)
        if self._penalized:
            rows = self._penalized_rows
            logits_SWV[rows] = self._penalize(logits_SWV[rows], ahead_SA, offset)
        if self._repeating:
            self._penalize_repeats(logits_SWV, ahead_SA, offset)
        return logits_SWV

    def _penalize_repeats(self, logits_SWV: Tensor, ahead_SA: Tensor | None, offset: int) -> None:
        num_places = logits_SWV.shape[1]
        ahead = [[]] * len(logits_SWV) if ahead_SA is None else ahead_SA[:, : offset + num_places - 1].tolist()
        for i, repeats, state in self._repeating:
            for place, (ids, penalties) in enumerate(repeats.places(state.tokens, ahead[i], num_places)):
                logits_SWV[i, place, torch.from_numpy(ids).to(self._device)] -= torch.from_numpy(penalties).to(
                    self._device, logits_SWV.dtype
                )

    def _constrain(self, logits_SWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        """Last of all changes, so that none of them allows what a grammar does not."""
        return mask_logits(logits_SWV, self._bits(logits_SWV.shape[1], ahead_SA, offset), self._constrained_rows)

    def _bits(self, num_places: int, ahead_SA: Tensor | None, offset: int) -> Bits:
        ahead = None if ahead_SA is None else ahead_SA.tolist()
        some = None if ahead is None else [ahead[i] for i in self._constrained_places]
        return self._masks.of(self._constrained, some, offset, num_places)

    def _mask_end_tokens(self, logits_SWV: Tensor, offset: int) -> None:
        for i, state in self._with_min_tokens:
            places = state.params.min_tokens - state.num_generated - offset
            if places > 0:
                ids = torch.tensor(
                    [*self._eos_ids, *state.params.stop_token_ids], device=self._device, dtype=torch.long
                )
                logits_SWV[i, :places].index_fill_(-1, ids, -torch.inf)

    def _penalize(self, logits_PWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        outputs_PV, prompts_PV = self._counts.of(self._penalized)
        outputs = outputs_PV.unsqueeze(1)
        if ahead_SA is not None and ahead_SA.shape[1]:
            outputs = outputs + occurrences(ahead_SA[self._penalized_rows], logits_PWV, offset)
        seen = outputs > 0
        factors = torch.where(seen | prompts_PV.unsqueeze(1), self._repetition, 1.0)
        logits_PWV = torch.where(logits_PWV < 0, logits_PWV * factors, logits_PWV / factors)
        return logits_PWV - outputs * self._frequency - seen * self._presence

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, device=self._device, dtype=torch.float32).view(-1, 1, 1)


def argmax_tokens(values_SWC: Tensor, ids_SWC: Tensor | None = None) -> Tensor:
    """The token [S, W] with the largest value, the first of equals; NO_TOKEN if the largest is not finite."""
    if values_SWC.device.type == "cpu" and ids_SWC is None:  # numpy is many times as fast here
        array = values_SWC.numpy()
        return torch.from_numpy(np.where(np.isfinite(array.max(-1)), array.argmax(-1), NO_TOKEN))
    value, place = values_SWC.max(-1)
    if ids_SWC is not None:
        place = ids_SWC.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return torch.where(value.isfinite(), place, NO_TOKEN)


def occurrences(ahead_PA: Tensor, logits_PWV: Tensor, offset: int) -> Tensor:
    """How often each token occurs among the first `offset + w` tokens ahead of place w [P, W, V]."""
    num_rows, ahead = ahead_PA.shape
    _, places, vocab_size = logits_PWV.shape
    marks = logits_PWV.new_zeros(num_rows, max(ahead + 1, offset + places), vocab_size)
    marks[:, 1 : ahead + 1].scatter_(-1, ahead_PA.unsqueeze(-1), 1.0)
    return marks.cumsum(1)[:, offset : offset + places]


def _biases(states: Sequence[SamplingState], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    biased = [(i, state.params.logit_bias) for i, state in enumerate(states) if state.params.logit_bias]
    if not biased:
        return None
    sizes = [len(biases) for _, biases in biased]
    rows = np.repeat([i for i, _ in biased], sizes)
    ids = np.fromiter((token for _, biases in biased for token in biases), np.int64, sum(sizes))
    values = np.fromiter((bias for _, biases in biased for bias in biases.values()), np.float32, sum(sizes))
    return (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(ids).to(device),
        torch.from_numpy(values).to(device).unsqueeze(1),
    )
