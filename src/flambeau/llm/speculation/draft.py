"""DraftProposer: a smaller network of the same vocabulary says what comes next, for all sequences at a time.

Its cache has tensors of its own and the blocks and slots of the target's, so that nothing is allocated for it. It may
be behind: it computes what it has not seen before it proposes anything.

Shapes: S sequences · K tokens proposed · F tokens of each that the draft has not seen · J = K - 1 of its own that it
computes · R sequences of which the distribution alone is promised · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.compute.forward import Forward
from flambeau.llm.compute.runner import Runner
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.sampling.rows import Row
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.scheduling.sequence import Sequence
from flambeau.llm.speculation.proposal import Proposal, by_promise, part, put

# The draft has not seen the last token, nor its own last one where all were kept; more is computed as a prompt is.
MOST_FED = 2


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
        return len(sequence.tokens) - sequence.num_in_draft <= MOST_FED <= len(sequence.tokens)

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute what the draft has not seen, as much of it as one step may compute."""
        left = self._max_step_tokens
        behind, starts, lengths = [], [], []
        for sequence in sequences:
            missing = len(sequence.tokens) - 1 - sequence.num_in_draft
            if missing >= MOST_FED and left > 0 and len(sequence.tokens) <= self._max_length:
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
        num_fed = max(len(s.tokens) - s.num_in_draft for s, length in zip(sequences, lengths, strict=True) if length)
        first_S = np.array([len(s.tokens) - num_fed for s in sequences])
        places_J = np.arange(num_ahead + num_fed - 1)
        is_real_SJ = None
        if min(lengths) < num_ahead:
            is_real_SJ = np.maximum(places_J + 1 - num_fed, 0) < np.array(lengths)[:, None]
        positions_SJ, slots_SJ = runner.real_places(rows, first_S[:, None] + places_J, is_real_SJ)
        last_ids_SF = np.array([s.tokens[-num_fed:] for s in sequences])
        context_lens_S = np.maximum(positions_SJ[:, num_fed - 1] + 1, num_fed)
        num_blocks = -(-max(int(positions_SJ.max()) + 1, num_fed) // runner.block_size)
        query_starts = np.arange(len(sequences) + 1)
        tables_SB = runner.tensor(runner.tables.columns(rows, num_blocks))
        first = StepInputs(
            runner.tensor(last_ids_SF.reshape(-1)),
            runner.tensor(positions_SJ[:, :num_fed].reshape(-1)),
            runner.tensor(slots_SJ[:, :num_fed].reshape(-1)),
            runner.tensor(query_starts * num_fed),
            runner.tensor(context_lens_S),
            tables_SB,
            query_len=num_fed,
        )
        positions_JS, slots_JS = runner.tensor(positions_SJ[:, num_fed:].T), runner.tensor(slots_SJ[:, num_fed:].T)
        return Steps(first, positions_JS, slots_JS, positions_JS + 1, runner.tensor(query_starts))

    def _draw(self, sequences: Many[Sequence], steps: Steps, lengths: list[int]) -> Proposal:
        rows = [sequence.row for sequence in sequences]
        greedy = self._forward.greedy
        if greedy is not None and self._sampler.takes_likeliest(rows):
            return Proposal(greedy.go_ahead(steps.first, steps.positions_JS, steps.slots_JS).T, lengths, None)
        exact, loose = by_promise(rows)
        num_ahead = 1 + steps.positions_JS.shape[0]
        ids_KS = torch.empty(num_ahead, len(rows), dtype=torch.int64, device=self._sampler.device)
        q_RV: list[Tensor] = []
        for place in range(num_ahead):
            logits_S1V = self._logits(steps, place, ids_KS)
            ahead_SA = ids_KS[:place].T
            if loose:
                ids_S, q = self._weighed(logits_S1V, ahead_SA, rows, exact, loose)
                q_RV.append(q)
            else:
                ids_S = self._sampler.sample(logits_S1V, rows, ahead_SA=ahead_SA, offset=place).view(-1)
            # A draft that computes nonsense proposes token 0, which is verified like any other.
            torch.clamp(ids_S, min=0, out=ids_KS[place])
        return Proposal(ids_KS.T, lengths, torch.stack(q_RV, 1) if loose else None)

    def _weighed(
        self, logits_S1V: Tensor, ahead_SA: Tensor, rows: Many[Row], exact: list[int], loose: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens, and the probabilities by which those were drawn of which the distribution alone is promised."""
        sampler, offset = self._sampler, ahead_SA.shape[1]
        ids_S1 = ahead_SA.new_empty(len(rows), 1)
        if exact:
            some, ahead = [rows[i] for i in exact], part(ahead_SA, exact)
            put(ids_S1, exact, sampler.sample(part(logits_S1V, exact), some, ahead_SA=ahead, offset=offset))
        some, ahead = [rows[i] for i in loose], part(ahead_SA, loose)
        scores_R1V = sampler.scores(part(logits_S1V, loose), some, ahead_SA=ahead, offset=offset)
        put(ids_S1, loose, sampler.draw(scores_R1V, some, offset=offset))
        return ids_S1.squeeze(1), scores_R1V.squeeze(1).softmax(-1)

    def _logits(self, steps: Steps, place: int, ids_KS: Tensor) -> Tensor:
        """The draft's logits [S, 1, V] for a place."""
        if place > 0:
            return self._forward.decode(steps.later(place, ids_KS[place - 1])).unsqueeze(1)
        num_fed = steps.first.query_len
        return self._forward.decode(steps.first)[num_fed - 1 :: num_fed].unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Steps:
    """The inputs of a round's passes: the first over what the draft has not seen, then one token each."""

    first: StepInputs
    positions_JS: Tensor
    slots_JS: Tensor
    context_lens_JS: Tensor
    query_starts: Tensor

    def later(self, place: int, ids_S: Tensor) -> StepInputs:
        """The token that was drawn for the place before."""
        return StepInputs(
            ids_S,
            self.positions_JS[place - 1],
            self.slots_JS[place - 1],
            self.query_starts,
            self.context_lens_JS[place - 1],
            self.first.block_tables_SB,
            query_len=1,
        )
