"""HeadProposer: a head proposes the next tokens from the hidden states that the target has computed anyway.

The head has an entry for each token that the target has computed: the token's hidden states together with the token
after it. The keys and values of entries are in the target's blocks, at the token's own place. Entries of new tokens
wait until the token after them is known, and until there is a reason to compute them: a proposal, or a block of them.

A round is a pass over the entries that wait, and one pass for each further token. It is plain PyTorch, kernels pass by
pass (`HeadKernels`), or captured as a whole (`HeadRounds`).

Of several layers of multi-token prediction each has an entry for each token, from hidden states of the layer before and
the token that is one further. A round is a pass of each layer over the entries that wait. Entries that were computed
with proposed tokens wait on, and are computed again.

Shapes: S sequences · F entries of each in the first pass · T entries of a pass · K tokens proposed · E hidden ·
X numbers of hidden states · D tokens of the head's vocabulary · V vocabulary · R sequences for which only the
distribution is promised
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.core.sequence import SamplingState, Sequence
from flambeau.llm.executor.head_plans import (
    RoundPlan,
    WaitingEntries,
    first_inputs,
    last_places,
    later_inputs,
    next_ids,
    plan_round,
    with_padding,
)
from flambeau.llm.executor.inputs import InputBuilder, StepInputs, to_tensor
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.attention import Attend
from flambeau.llm.models.draft_heads import DraftHead, MtpHead
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.rounds import sample_round
from flambeau.llm.speculation.speculator import Proposal, TokenSpan, gather_rows, split_by_exactness

AttentionFactory = Callable[[KVCache, StepInputs], Attend]


@dataclass(frozen=True, slots=True)
class DrawnRound:
    """The tokens of a round, and the logits that they were drawn from; valid until the next round."""

    ids_SK: Tensor
    logits_SKD: Tensor


class CapturedHeadRound(Protocol):
    """A round with its sampling in one call."""

    def run(self, plan: RoundPlan, states_TX: Tensor, settings: RowSettings) -> DrawnRound:
        """Draw with the random numbers that the target will use; `states_TX` are those of all entries, one by one."""


class HeadRounds(Protocol):
    """Rounds that are captured in the background."""

    def find(self, num_sequences: int, num_ahead: int) -> CapturedHeadRound | None:
        """The round for so many sequences, of `num_ahead + 1` entries each at most; None: there is none at present."""

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was asked for is compiled or has failed; False after the timeout."""

    def close(self) -> None:
        """Stop what runs in the background."""


class HeadKernels(Protocol):
    """Passes of a head by kernels, one by one."""

    def run(self, inputs: StepInputs, hidden_TE: Tensor) -> Tensor | None:
        """What the head goes on from [T, E]; None: the kernels are not ready."""


@dataclass(frozen=True, slots=True)
class HeadModel:
    """A head, its cache in the target's blocks, and the hidden states that the target's backend writes."""

    head: DraftHead
    cache: KVCache
    states: HiddenStates
    attention: AttentionFactory
    rounds: HeadRounds | None = None  # None: pass by pass
    kernels: HeadKernels | None = None  # None: plain PyTorch


class HeadProposer:
    """Proposes what the head samples with the random numbers that the target will use."""

    reads_states = True

    def __init__(self, model: HeadModel, inputs: InputBuilder, sampler: Sampler) -> None:
        self._model, self._head = model, model.head
        self._inputs, self._sampler = inputs, sampler
        self._device = model.cache.keys[0].device
        self._num_depths = model.head.settings.num_depths
        self._dtype = model.head.embed(torch.zeros(1, dtype=torch.int64, device=self._device)).dtype
        self._waiting: dict[Sequence, WaitingEntries] = {}

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Keep the hidden states of these tokens; a block of entries is computed at once."""
        states_TX = self._model.states.take().to(self._dtype)  # the kernels of the CPU write float32
        due = []
        for span in spans:
            waiting = self._waiting.get(span.sequence)
            if waiting is None or waiting.end != span.start:  # entries before it are in a prefix that another computed
                waiting = self._waiting[span.sequence] = WaitingEntries(span.start)
            waiting.add(states_TX[span.row : span.row + span.length])
            if waiting.num_ready(span.sequence, self._num_depths) >= self._inputs.block_size - 1:
                due.append(span.sequence)
        if due:
            self._catch_up(due)

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence whose hidden states are known; None: for none."""
        lengths = [limit if self._is_known(s) else 0 for s, limit in zip(sequences, limits, strict=True)]
        if self._num_depths > 1:
            lengths = [min(length, self._num_depths) for length in lengths]
        if not any(lengths):
            return None
        states = [sequence.sampling for sequence in sequences]
        rounds = self._model.rounds
        captured = None if rounds is None else rounds.find(len(sequences), num_ahead)
        if captured is not None:
            return self._propose_captured(captured, sequences, states, lengths, num_ahead)
        plan, taken_TX = self._plan(sequences, lengths, num_ahead)
        first, places_S = first_inputs(plan), last_places(plan).to(self._device)
        hidden_TE = self._head.combine(with_padding(plan, taken_TX))
        round_: HeadRound
        if self._num_depths > 1:
            round_ = DepthRound(first.to(self._device), places_S, hidden_TE, self._run, self._head)
        else:
            round_ = HeadRound(later_inputs(plan, self._device), self._run, self._head)
            round_.hidden_SE = self._run(first, hidden_TE)[places_S]
        if not self._sampler.takes_argmax(states):
            return sample_round(self._sampler, states, lengths, num_ahead, round_.logits)
        return Proposal(round_.most_likely(num_ahead), lengths, None)

    def _propose_captured(
        self,
        captured: CapturedHeadRound,
        sequences: Many[Sequence],
        states: Many[SamplingState],
        lengths: list[int],
        num_ahead: int,
    ) -> Proposal:
        width = num_ahead + 1
        behind = [s for s in sequences if self._is_known(s) and self._waiting[s].length > width]
        if behind:
            self._catch_up(behind, num_kept=1)
        plan, taken_TX = self._plan(sequences, lengths, num_ahead, width)
        drawn = captured.run(plan, taken_TX, self._sampler.draw_settings(states))
        return Proposal(drawn.ids_SK, lengths, self._probabilities(drawn, states))

    def _probabilities(self, drawn: DrawnRound, states: Many[SamplingState]) -> Tensor | None:
        """The probabilities [R, K, V] that tokens were drawn from.

        None where penalties or grammars change the target's logits and not the head's: its tokens count as the only
        ones that could have been proposed, which is exact for tokens from anywhere.
        """
        _, loose = split_by_exactness(states)
        settings = self._sampler.row_settings(states)
        if not loose or settings is None or settings.is_constrained:
            return None
        logits_RKV = self._head.to_target_tokens(gather_rows(drawn.logits_SKD, loose).float())
        return self._sampler.scores(logits_RKV, [states[i] for i in loose]).softmax(-1)

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Nothing to do: entries of proposed tokens are computed again from the target's hidden states."""

    def forget(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)

    def _is_known(self, sequence: Sequence) -> bool:
        """Whether hidden states up to the token before the last wait, with the last token as the next one."""
        waiting = self._waiting.get(sequence)
        return waiting is not None and waiting.length > 0 and waiting.end == len(sequence.tokens) - 1

    def _run(self, inputs: StepInputs, hidden_TE: Tensor, depth: int = 0) -> Tensor:
        """The head's hidden states [T, E] of these entries; their keys and values are written."""
        found = None if self._model.kernels is None else self._model.kernels.run(inputs, hidden_TE)
        if found is not None:
            return found
        inputs = inputs.to(self._device)
        attend = self._model.attention(self._model.cache, inputs)
        if self._num_depths > 1:
            assert isinstance(self._head, MtpHead)
            return self._head.run_depth(depth, inputs.ids_T, hidden_TE, inputs.positions_T, attend)
        return self._head(inputs.ids_T, hidden_TE, inputs.positions_T, attend)  # type: ignore[no-any-return]

    def _catch_up(self, sequences: Many[Sequence], num_kept: int = 0) -> None:
        """Compute the entries of these sequences whose next token is known, but for the last `num_kept`."""
        waiting = [self._waiting[sequence] for sequence in sequences]
        lengths = [
            each.num_ready(sequence, self._num_depths) - num_kept
            for each, sequence in zip(waiting, sequences, strict=True)
        ]
        inputs = self._inputs.prefill(sequences, [each.start for each in waiting], lengths)
        ids = [np.concatenate(next_ids(sequences, waiting, lengths, depth)) for depth in range(self._num_depths)]
        states_TX = torch.cat([each.take(length) for each, length in zip(waiting, lengths, strict=True)])
        hidden_TE = self._head.combine(states_TX)
        for depth, ids_T in enumerate(ids):
            hidden_TE = self._run(replace(inputs, ids_T=to_tensor(ids_T)), hidden_TE, depth)

    def _plan(
        self, sequences: Many[Sequence], lengths: Many[int], num_ahead: int, width: int | None = None
    ) -> tuple[RoundPlan, Tensor]:
        """The plan of a round over all entries that wait, and their hidden states [T, X].

        A sequence whose hidden states are not known has only padding. Without a width, there is as much as needed.
        """
        waiting = [self._waiting[s] if self._is_known(s) else WaitingEntries(0) for s in sequences]
        plan = plan_round(self._inputs, sequences, waiting, lengths, num_ahead, width)
        num_kept = self._num_depths - 1
        return plan, torch.cat([each.take(each.length, num_kept) for each in waiting if each.length])


class HeadRound:
    """The passes of one round, each from the hidden states of the one before."""

    def __init__(self, later: Many[StepInputs], run: Callable[..., Tensor], head: DraftHead) -> None:
        self._later, self._run, self._head = later, run, head
        self.hidden_SE: Tensor

    def logits(self, place: int, last_S: Tensor | None) -> Tensor:
        """The logits [S, V] for a place, after the tokens drawn for the one before."""
        self._advance(place, last_S)
        return self._head.logits(self.hidden_SE)

    def most_likely(self, num_ahead: int) -> Tensor:
        """Greedy tokens [S, K]; 0 where logits are not finite."""
        found: list[Tensor] = []
        for place in range(num_ahead):
            self._advance(place, found[-1] if found else None)
            ids_S = argmax_tokens(self._head.draft_logits(self.hidden_SE)).clamp_(min=0)
            found.append(ids_S if self._head.target_ids_D is None else self._head.target_ids_D[ids_S])
        return torch.stack(found, 1)

    def _advance(self, place: int, last_S: Tensor | None) -> None:
        if last_S is not None:
            self.hidden_SE = self._run(replace(self._later[place - 1], ids_T=last_S), self.hidden_SE)


class DepthRound(HeadRound):
    """The passes of a round by several layers, each over all entries that wait."""

    def __init__(
        self, first: StepInputs, places_S: Tensor, hidden_TE: Tensor, run: Callable[..., Tensor], head: DraftHead
    ) -> None:
        super().__init__((), run, head)
        self._first, self._places_S, self._hidden_TE = first, places_S, hidden_TE
        self._ids_SF = first.ids_T.view(-1, first.query_len)
        self._rows_S = torch.arange(len(self._ids_SF), device=places_S.device)

    def _advance(self, place: int, last_S: Tensor | None) -> None:
        if place >= self._head.settings.num_depths:
            return  # no more are proposed
        if last_S is not None:  # each entry reads the token after the one before
            self._ids_SF = self._ids_SF.roll(-1, dims=1)
            self._ids_SF[self._rows_S, self._places_S % self._first.query_len] = last_S
        inputs = replace(self._first, ids_T=self._ids_SF.flatten())
        self._hidden_TE = self._run(inputs, self._hidden_TE, place)
        self.hidden_SE = self._hidden_TE[self._places_S]
