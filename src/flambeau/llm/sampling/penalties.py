"""What a request does to logits before any token is weighed: bias, penalties, and no end before `min_tokens`.

Shapes: S rows · W places of each row · V vocabulary · P rows with penalties · A tokens proposed ahead
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.sampling.rows import Row


class Counts:
    """How often each token occurs in the output of a row, and whether it is in its prompt; kept up token by token."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._outputs = torch.zeros(0, vocab_size, device=device)
        self._prompts = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._lines: weakref.WeakKeyDictionary[Row, list[int]] = weakref.WeakKeyDictionary()  # line, tokens seen
        self._free: list[int] = []

    def of(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Occurrences in the outputs [P, V], and which tokens are in the prompts [P, V]."""
        states = [self._lines.get(row) or self._open(row) for row in rows]
        lines: list[int] = []
        ids: list[int] = []
        for row, state in zip(rows, states, strict=True):
            new = row.tokens[state[1] :]
            lines += [state[0]] * len(new)
            ids += new
            state[1] += len(new)
        device = self._outputs.device
        if ids:
            places = torch.tensor(lines, device=device), torch.tensor(ids, device=device)
            self._outputs.index_put_(places, torch.ones(len(ids), device=device), accumulate=True)
        chosen = torch.tensor([state[0] for state in states], device=device)
        return self._outputs[chosen], self._prompts[chosen]

    def _open(self, row: Row) -> list[int]:
        if not self._free:
            self._grow()
        line = self._free.pop()
        self._outputs[line] = 0
        self._prompts[line] = False
        self._prompts[line, torch.tensor(row.tokens[: row.num_prompt], device=self._prompts.device)] = True
        self._lines[row] = state = [line, row.num_prompt]
        weakref.finalize(row, self._free.append, line).atexit = False
        return state

    def _grow(self) -> None:
        old = len(self._outputs)
        more = max(4, old)
        self._outputs = torch.cat([self._outputs, self._outputs.new_zeros(more, self._outputs.shape[1])])
        self._prompts = torch.cat([self._prompts, self._prompts.new_zeros(more, self._prompts.shape[1])])
        self._free += range(old, old + more)


class Edits:
    """The changes that a fixed list of rows makes to its logits, step after step."""

    def __init__(self, rows: Sequence[Row], counts: Counts, eos_ids: Sequence[int], device: torch.device) -> None:
        self._counts, self._eos_ids, self._device = counts, eos_ids, device
        self._biased = _biases(rows, device)
        self._held = [(i, row) for i, row in enumerate(rows) if row.params.min_tokens]
        penalized = [(i, row) for i, row in enumerate(rows) if row.has_penalties]
        self._penalized = [row for _, row in penalized]
        self._lines = torch.tensor([i for i, _ in penalized], device=device)
        params = [row.params for row in self._penalized]
        self._repetition = self._column([p.repetition_penalty for p in params])
        self._presence = self._column([p.presence_penalty for p in params])
        self._frequency = self._column([p.frequency_penalty for p in params])
        self.are_none = not (self._biased or self._held or self._penalized)

    def apply(self, logits_SWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        """Changed logits; place w of a row comes after its output and the first `offset + w` of the tokens ahead."""
        if self.are_none:
            return logits_SWV
        logits_SWV = logits_SWV.clone()
        if self._biased:
            lines, ids, values = self._biased
            logits_SWV[lines, :, ids] += values
        self._hold_back(logits_SWV, offset)
        if self._penalized:
            logits_SWV[self._lines] = self._penalize(logits_SWV[self._lines], ahead_SA, offset)
        return logits_SWV

    def _hold_back(self, logits_SWV: Tensor, offset: int) -> None:
        for i, row in self._held:
            places = row.params.min_tokens - row.num_generated - offset
            if places > 0:
                ids = torch.tensor([*self._eos_ids, *row.params.stop_token_ids], device=self._device, dtype=torch.long)
                logits_SWV[i, :places].index_fill_(-1, ids, -torch.inf)

    def _penalize(self, logits_PWV: Tensor, ahead_SA: Tensor | None, offset: int) -> Tensor:
        outputs_PV, prompts_PV = self._counts.of(self._penalized)
        outputs = outputs_PV.unsqueeze(1)
        if ahead_SA is not None and ahead_SA.shape[1]:
            outputs = outputs + occurrences(ahead_SA[self._lines], logits_PWV, offset)
        seen = outputs > 0
        factors = torch.where(seen | prompts_PV.unsqueeze(1), self._repetition, 1.0)
        logits_PWV = torch.where(logits_PWV < 0, logits_PWV * factors, logits_PWV / factors)
        return logits_PWV - outputs * self._frequency - seen * self._presence

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, device=self._device, dtype=torch.float32).view(-1, 1, 1)


def occurrences(ahead_PA: Tensor, logits_PWV: Tensor, offset: int) -> Tensor:
    """How often each token occurs among the first `offset + w` tokens ahead of place w: [P, W, V]."""
    rows, ahead = ahead_PA.shape
    _, places, vocab_size = logits_PWV.shape
    marks = logits_PWV.new_zeros(rows, max(ahead + 1, offset + places), vocab_size)
    marks[:, 1 : ahead + 1].scatter_(-1, ahead_PA.unsqueeze(-1), 1.0)
    return marks.cumsum(1)[:, offset : offset + places]


def _biases(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    biased = [(i, row.params.logit_bias) for i, row in enumerate(rows) if row.params.logit_bias]
    if not biased:
        return None
    sizes = [len(biases) for _, biases in biased]
    lines = np.repeat([i for i, _ in biased], sizes)
    ids = np.fromiter((token for _, biases in biased for token in biases), np.int64, sum(sizes))
    values = np.fromiter((bias for _, biases in biased for bias in biases.values()), np.float32, sum(sizes))
    return (
        torch.from_numpy(lines).to(device),
        torch.from_numpy(ids).to(device),
        torch.from_numpy(values).to(device).unsqueeze(1),
    )
