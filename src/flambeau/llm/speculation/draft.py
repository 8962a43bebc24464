"""DraftProposer: a smaller network of the same vocabulary says what comes next, for all sequences at a time.

Its cache has tensors of its own and the blocks and slots of the target's, so that nothing is allocated for it. It may
be behind: it computes what it has not seen before it proposes anything.

Shapes: S sequences · K tokens proposed · J = K + 1 tokens that it computes of each: the last two, then its own · R
sequences of which the distribution alone is promised · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.forward import Forward
from flambeau.llm.rows import Row
from flambeau.llm.runner import Runner
from flambeau.llm.sampler import Sampler
from flambeau.llm.sequence import Sequence
from flambeau.llm.speculation.proposal import Proposal, by_promise, part, put
from flambeau.llm.step_inputs import StepInputs

# After a round in which all were kept, the draft has not seen the last two tokens; it always computes both again.
NUM_FED = 2


class DraftProposer:
    """Proposes what the draft draws, with the noise that the target will draw with."""

    def __init__(
        self, forward: Forward, runner: Runner, sampler: Sampler, *, max_length: int, max_step_tokens: int
    ) -> None:
        self._forward, self._runner, self._sampler = forward, runner, sampler
        self._max_length = max_length
        self._max_step_tokens = max_step_tokens  # that it catches up in one step

    def propose(self, sequences: Many[Sequence], most: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `most` tokens for each that the draft has caught up with; None: for nobody."""
        wanted = [sequence for sequence, number in zip(sequences, most, strict=True) if number]
        self._catch_up(wanted)
        lengths = [
            max(0, min(number, self._max_length - len(sequence.tokens))) if self._has_seen(sequence) else 0
            for sequence, number in zip(sequences, most, strict=True)
        ]
        if not any(lengths):
            return None
        steps = self._steps(sequences, lengths, num_ahead)
        return self._draw(sequences, steps, lengths)

    def kept(self, sequence: Sequence, num_before: int, num_proposed: int, num_kept: int) -> None:
        """Its own last token is not in the cache, nor what comes after one that was refused."""
        if num_proposed:
            sequence.num_in_draft = num_before + min(num_kept, num_proposed - 1)

    def forget(self, sequence: Sequence) -> None:
        """What it knows of a sequence is kept with the sequence."""

    def _has_seen(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) - sequence.num_in_draft <= NUM_FED <= len(sequence.tokens)

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute what the draft has not seen, as much of it as one step may compute."""
        left = self._max_step_tokens
        behind, starts, lengths = [], [], []
        for sequence in sequences:
            missing = len(sequence.tokens) - 1 - sequence.num_in_draft
            if missing >= NUM_FED and left > 0 and len(sequence.tokens) <= self._max_length:
                behind.append(sequence)
                starts.append(sequence.num_in_draft)
                lengths.append(min(missing, left))
                left -= lengths[-1]
        if not behind:
            return
        inputs = self._runner.prefill_inputs(behind, starts, lengths)
        self._forward.prefill(inputs, inputs.ids_T.new_zeros(1))
        for sequence, length in zip(behind, lengths, strict=True):
            sequence.num_in_draft += length

    def _steps(self, sequences: Many[Sequence], lengths: Many[int], num_ahead: int) -> Steps:
        """The tensors of all passes of a round; only the ids are not known yet."""
        runner = self._runner
        rows = runner.tables.rows(sequences)
        first_S = np.fromiter((len(s.tokens) - NUM_FED for s in sequences), dtype=np.int64, count=len(sequences))
        places_J = np.arange(num_ahead + 1)
        is_real_SJ = np.maximum(places_J - 1, 0) < np.array(lengths)[:, None]
        positions_SJ, slots_SJ = runner.real_places(rows, first_S[:, None] + places_J, is_real_SJ)
        num_blocks = -(-int(positions_SJ.max() + 1) // runner.block_size)
        last_ids_SF = np.array([s.tokens[-NUM_FED:] for s in sequences], dtype=np.int64)
        return Steps(
            first_ids_SF=runner.tensor(last_ids_SF),
            positions_JS=runner.tensor(np.ascontiguousarray(positions_SJ.T)),
            slots_JS=runner.tensor(np.ascontiguousarray(slots_SJ.T)),
            query_starts=runner.tensor(np.arange(len(sequences) + 1)),
            block_tables_SB=runner.tensor(runner.tables.columns(rows, num_blocks)),
        )

    def _draw(self, sequences: Many[Sequence], steps: Steps, lengths: list[int]) -> Proposal:
        rows = [sequence.row for sequence in sequences]
        exact, loose = by_promise(rows)
        num_ahead = len(steps.positions_JS) - 1
        ids_KS = steps.first_ids_SF.new_empty(num_ahead, len(rows))
        q_RV: list[Tensor] = []
        for place in range(num_ahead):
            logits_S1V, ahead_SA = self._logits(steps, place, ids_KS), ids_KS[:place].T
            if exact:
                put(ids_KS[place], exact, self._sampled(logits_S1V, ahead_SA, rows, exact))
            if loose:
                ids, q = self._weighed(logits_S1V, ahead_SA, rows, loose)
                put(ids_KS[place], loose, ids)
                q_RV.append(q)
            # A draft that computes nonsense proposes token 0, which is verified like any other.
            ids_KS[place].clamp_(min=0)
        return Proposal(ids_KS.T, lengths, torch.stack(q_RV, 1) if loose else None)

    def _sampled(self, logits_S1V: Tensor, ahead_SA: Tensor, rows: Many[Row], places: list[int]) -> Tensor:
        """Tokens for some places of the batch."""
        some = [rows[i] for i in places]
        ahead = part(ahead_SA, places)
        offset = ahead_SA.shape[1]
        return self._sampler.sample(part(logits_S1V, places), some, ahead_SA=ahead, offset=offset).squeeze(1)

    def _weighed(
        self, logits_S1V: Tensor, ahead_SA: Tensor, rows: Many[Row], places: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens for some places of the batch, and the probabilities they were drawn by."""
        some, offset = [rows[i] for i in places], ahead_SA.shape[1]
        ahead = part(ahead_SA, places)
        scores_R1V = self._sampler.scores(part(logits_S1V, places), some, ahead_SA=ahead, offset=offset)
        return self._sampler.draw(scores_R1V, some, offset=offset).squeeze(1), scores_R1V.squeeze(1).softmax(-1)

    def _logits(self, steps: Steps, place: int, ids_KS: Tensor) -> Tensor:
        """The draft's logits [S, 1, V] for a place; the first pass computes two tokens of each sequence."""
        if place == 0:
            return self._forward.decode(steps.first())[NUM_FED - 1 :: NUM_FED].unsqueeze(1)
        return self._forward.decode(steps.later(place, ids_KS[place - 1])).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Steps:
    """The inputs of a round's passes."""

    first_ids_SF: Tensor
    positions_JS: Tensor
    slots_JS: Tensor
    query_starts: Tensor
    block_tables_SB: Tensor

    def first(self) -> StepInputs:
        """The last two tokens of each sequence."""
        return StepInputs(
            self.first_ids_SF.flatten(),
            self.positions_JS[:NUM_FED].T.flatten(),
            self.slots_JS[:NUM_FED].T.flatten(),
            self.query_starts * NUM_FED,
            (self.positions_JS[NUM_FED - 1] + 1).clamp_(min=NUM_FED),
            self.block_tables_SB,
            query_len=NUM_FED,
        )

    def later(self, place: int, ids_S: Tensor) -> StepInputs:
        """The token that was drawn for the place before."""
        positions_S = self.positions_JS[place + 1]
        slots_S = self.slots_JS[place + 1]
        return StepInputs(
            ids_S, positions_S, slots_S, self.query_starts, positions_S + 1, self.block_tables_SB, query_len=1
        )
