"""DraftProposer: a smaller network with the same vocabulary proposes the next tokens of all sequences together.

The draft model's cache has tensors of its own but uses the target's blocks and slots, so nothing is allocated for it.
It may be behind the target: it computes the tokens it has not seen before it proposes any.

Shapes: S sequences · K tokens proposed · F tokens of each that the draft has not seen · J = K - 1 of its own tokens
that it computes · R sequences for which only the distribution is promised · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.config import EngineConfig
from flambeau.llm.core.sequence import SamplingState, Sequence
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.inputs import InputBuilder, StepInputs, to_tensor
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.adaptive_k import candidate_numbers
from flambeau.llm.speculation.ngram import LONG_REPEAT, NgramFirstProposer, NgramProposer
from flambeau.llm.speculation.speculator import (
    Proposal,
    Proposer,
    Speculator,
    gather_rows,
    scatter_rows,
    split_by_exactness,
)

# The draft lacks the last token, and its own last one if all were accepted. More than that is computed as a prompt.
MAX_FED = 2


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A smaller network with the same vocabulary; its cache uses the target's blocks."""

    backend: Backend
    max_length: int


def make_speculator(
    config: EngineConfig, inputs: InputBuilder, sampler: Sampler, draft: DraftModel | None
) -> Speculator | None:
    """The speculator that the configuration asks for; None for no speculation."""
    kind = config.speculation or ("draft" if draft else None)
    if kind is None or config.speculate_k < 1:
        return None
    if kind == "draft" and draft is None:
        raise LLMError('speculation "draft" needs a draft: a folder with a smaller model of the same vocabulary')
    proposer: Proposer = NgramProposer(sampler.device)
    if kind == "draft" and draft is not None:
        drafting = DraftProposer(
            draft.backend, inputs, sampler, max_length=draft.max_length, max_step_tokens=config.max_step_tokens
        )
        proposer = NgramFirstProposer(drafting, NgramProposer(sampler.device, min_match=LONG_REPEAT))
    # On a GPU every number of tokens needs a CUDA graph of its own.
    numbers = candidate_numbers(config.speculate_k) if sampler.device.type == "cpu" else [config.speculate_k, 0]
    return Speculator(proposer, numbers=numbers, max_step_tokens=config.max_step_tokens)


class DraftProposer:
    """Proposes what the draft model samples with the random numbers that the target will use."""

    def __init__(
        self, backend: Backend, inputs: InputBuilder, sampler: Sampler, *, max_length: int, max_step_tokens: int
    ) -> None:
        self._backend, self._inputs, self._sampler = backend, inputs, sampler
        self._max_length = max_length
        self._max_step_tokens = max_step_tokens  # of catching up in one step

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence that the draft has caught up with; None: for none."""
        wanted = [sequence for sequence, limit in zip(sequences, limits, strict=True) if limit]
        self._catch_up(wanted)
        lengths = [
            max(0, min(limit, self._max_length - len(sequence.tokens))) if self._has_seen(sequence) else 0
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        if not any(lengths):
            return None
        round_ = self._build_round(sequences, lengths, num_ahead)
        return self._sample_round(sequences, round_, lengths)

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """The draft's cache lacks its own last token, and everything after a rejected one."""
        if num_proposed:
            sequence.num_in_draft = num_before + min(num_accepted, num_proposed - 1)

    def forget(self, sequence: Sequence) -> None:
        """Nothing to do: the state is in the sequence."""

    def _has_seen(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) - sequence.num_in_draft <= MAX_FED <= len(sequence.tokens)

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute what the draft has not seen, up to `max_step_tokens`."""
        left = self._max_step_tokens
        behind, starts, lengths = [], [], []
        for sequence in sequences:
            missing = len(sequence.tokens) - 1 - sequence.num_in_draft
            if missing >= MAX_FED and left > 0 and len(sequence.tokens) <= self._max_length:
                behind.append(sequence)
                starts.append(sequence.num_in_draft)
                lengths.append(min(missing, left))
                left -= lengths[-1]
        if not behind:
            return
        inputs = self._inputs.prefill(behind, starts, lengths)
        self._backend.prefill(inputs, inputs.ids_T.new_zeros(1))
        for sequence, length in zip(behind, lengths, strict=True):
            sequence.num_in_draft += length

    def _build_round(self, sequences: Many[Sequence], lengths: Many[int], num_ahead: int) -> DraftRound:
        """The tensors of all passes of a round; only the ids are not known yet."""
        builder = self._inputs
        rows = builder.tables.rows(sequences)
        num_fed = max(len(s.tokens) - s.num_in_draft for s, length in zip(sequences, lengths, strict=True) if length)
        first_S = np.array([len(s.tokens) - num_fed for s in sequences])
        places_J = np.arange(num_ahead + num_fed - 1)
        is_real_SJ = None
        if min(lengths) < num_ahead:
            is_real_SJ = np.maximum(places_J + 1 - num_fed, 0) < np.array(lengths)[:, None]
        positions_SJ, slots_SJ = builder.positions_and_slots(rows, first_S[:, None] + places_J, is_real_SJ)
        last_ids_SF = np.array([s.tokens[-num_fed:] for s in sequences])
        context_lens_S = np.maximum(positions_SJ[:, num_fed - 1] + 1, num_fed)
        num_blocks = -(-max(int(positions_SJ.max()) + 1, num_fed) // builder.block_size)
        query_starts = np.arange(len(sequences) + 1)
        first = StepInputs(
            to_tensor(last_ids_SF.reshape(-1)),
            to_tensor(positions_SJ[:, :num_fed].reshape(-1)),
            to_tensor(slots_SJ[:, :num_fed].reshape(-1)),
            to_tensor(query_starts * num_fed),
            to_tensor(context_lens_S),
            to_tensor(builder.tables.columns(rows, num_blocks)),
            query_len=num_fed,
        )
        positions_JS, slots_JS = to_tensor(positions_SJ[:, num_fed:].T), to_tensor(slots_SJ[:, num_fed:].T)
        return DraftRound(first, positions_JS, slots_JS, positions_JS + 1, to_tensor(query_starts))

    def _sample_round(self, sequences: Many[Sequence], round_: DraftRound, lengths: list[int]) -> Proposal:
        states = [sequence.sampling for sequence in sequences]
        greedy = self._backend.greedy
        if greedy is not None and self._sampler.takes_argmax(states):
            return Proposal(greedy.argmax_steps(round_.first, round_.positions_JS, round_.slots_JS).T, lengths, None)
        exact, loose = split_by_exactness(states)
        num_ahead = 1 + round_.positions_JS.shape[0]
        ids_KS = torch.empty(num_ahead, len(states), dtype=torch.int64, device=self._sampler.device)
        q_RV: list[Tensor] = []
        for place in range(num_ahead):
            logits_S1V = self._logits(round_, place, ids_KS)
            ahead_SA = ids_KS[:place].T
            if loose:
                ids_S, q = self._sample_with_q(logits_S1V, ahead_SA, states, exact, loose)
                q_RV.append(q)
            else:
                ids_S = self._sampler.sample(logits_S1V, states, ahead_SA=ahead_SA, offset=place).view(-1)
            # A draft whose logits are not finite proposes token 0, which is verified like any other.
            torch.clamp(ids_S, min=0, out=ids_KS[place])
        return Proposal(ids_KS.T, lengths, torch.stack(q_RV, 1) if loose else None)

    def _sample_with_q(
        self, logits_S1V: Tensor, ahead_SA: Tensor, states: Many[SamplingState], exact: list[int], loose: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens [S], and the probabilities [R, V] that the loose ones were drawn from."""
        sampler, offset = self._sampler, ahead_SA.shape[1]
        ids_S1 = ahead_SA.new_empty(len(states), 1)
        if exact:
            some, ahead = [states[i] for i in exact], gather_rows(ahead_SA, exact)
            ids = sampler.sample(gather_rows(logits_S1V, exact), some, ahead_SA=ahead, offset=offset)
            scatter_rows(ids_S1, exact, ids)
        some, ahead = [states[i] for i in loose], gather_rows(ahead_SA, loose)
        scores_R1V = sampler.scores(gather_rows(logits_S1V, loose), some, ahead_SA=ahead, offset=offset)
        scatter_rows(ids_S1, loose, sampler.draw(scores_R1V, some, offset=offset))
        return ids_S1.squeeze(1), scores_R1V.squeeze(1).softmax(-1)

    def _logits(self, round_: DraftRound, place: int, ids_KS: Tensor) -> Tensor:
        """The draft's logits [S, 1, V] for a place."""
        if place > 0:
            return self._backend.decode(round_.later(place, ids_KS[place - 1])).unsqueeze(1)
        num_fed = round_.first.query_len
        return self._backend.decode(round_.first)[num_fed - 1 :: num_fed].unsqueeze(1)


@dataclass(frozen=True, slots=True)
class DraftRound:
    """The inputs of a round's passes: the first over the tokens that the draft has not seen, then one token each."""

    first: StepInputs
    positions_JS: Tensor
    slots_JS: Tensor
    context_lens_JS: Tensor
    query_starts: Tensor

    def later(self, place: int, ids_S: Tensor) -> StepInputs:
        """The pass that computes the tokens drawn for the place before."""
        return StepInputs(
            ids_S,
            self.positions_JS[place - 1],
            self.slots_JS[place - 1],
            self.query_starts,
            self.context_lens_JS[place - 1],
            self.first.block_tables_SB,
            query_len=1,
        )
