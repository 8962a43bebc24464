"""DraftProposer: a smaller network with the same vocabulary proposes the next tokens of all sequences together.

The draft model's cache has tensors of its own but uses the target's blocks and slots, so nothing is allocated for it.
It may be behind the target: it computes the tokens it has not seen before it proposes any.

A draft with recurrent layers keeps the states after the last few tokens of a sequence, in a ring of slots: the place of
a state follows from the position of its token. So the draft goes on from any of them, and may compute a token twice.

Shapes: S sequences · K tokens proposed · F tokens of each that the draft has not seen · J = K - 1 of its own tokens
that it computes · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.state_slots import StateCopy
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.inputs import InputBuilder, Ints, StepInputs, to_tensor
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.rounds import sample_round
from flambeau.llm.speculation.speculator import Proposal, TokenSpan

# The draft lacks the last token, and its own last one if all were accepted. More than that is computed as a prompt.
MAX_FED = 2


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A smaller network with the same vocabulary; its cache uses the target's blocks."""

    backend: Backend
    max_length: int
    rings: StateRings | None = None  # None: it has no recurrent layers


class StateRings:
    """The states of a draft after the last `length` tokens of each sequence that has a ring."""

    def __init__(self, states: StateCache, length: int) -> None:
        self._states, self._length = states, length
        self._free = [*range(states.num_slots // length)]
        self._rings: dict[Sequence, int] = {}

    def take(self, sequence: Sequence) -> bool:
        """Whether a sequence has a ring; it gets one if there is one left."""
        if sequence not in self._rings and self._free:
            self._rings[sequence] = self._free.pop()
        return sequence in self._rings

    def forget(self, sequence: Sequence) -> None:
        if (ring := self._rings.pop(sequence, None)) is not None:
            self._free.append(ring)

    def slots(self, sequences: Many[Sequence], positions_SQ: Ints) -> Ints:
        """Where the states after these positions are; slot 0 for sequences without a ring."""
        rings = np.array([self._rings.get(sequence, -1) for sequence in sequences])[:, None]
        return np.where(rings < 0, 0, 1 + rings * self._length + positions_SQ % self._length)

    def copy(self, sequences: Many[Sequence], starts: Many[int], ends: Many[int]) -> Tensor:
        """Copy the states before `starts` to where those before `ends` will be; returns the slots of these."""
        befores_S, afters_S = (self.slots(sequences, np.array(each)[:, None] - 1)[:, 0] for each in (starts, ends))
        pairs = zip(befores_S.tolist(), afters_S.tolist(), starts, strict=True)
        self._states.copy(StateCopy(before, after) for before, after, start in pairs if start and before != after)
        return to_tensor(afters_S)


class DraftProposer:
    """Proposes what the draft model samples with the random numbers that the target will use."""

    reads_states = False

    def __init__(self, draft: DraftModel, inputs: InputBuilder, sampler: Sampler, *, max_step_tokens: int) -> None:
        self._backend, self._inputs, self._sampler = draft.backend, inputs, sampler
        self._max_length, self._rings = draft.max_length, draft.rings
        # Prompts are computed up to here: a ring has the state after their last token only, and tokens are fed again.
        self._num_left = 1 if draft.rings is None else MAX_FED
        self._max_step_tokens = max_step_tokens  # of catching up in one step

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence that the draft has caught up with; None: for none."""
        rings = self._rings
        wanted = [
            sequence
            for sequence, limit in zip(sequences, limits, strict=True)
            if limit and (rings is None or rings.take(sequence))
        ]
        self._catch_up(wanted)
        lengths = [
            max(0, min(limit, self._max_length - len(sequence.tokens)))
            if sequence in wanted and self._has_seen(sequence)
            else 0
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

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Nothing to do: the draft computes the tokens by itself."""

    def forget(self, sequence: Sequence) -> None:
        """Free its states; what else is kept is in the sequence."""
        if self._rings is not None:
            self._rings.forget(sequence)

    def _has_seen(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) - sequence.num_in_draft <= MAX_FED <= len(sequence.tokens)

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute what the draft has not seen, up to `max_step_tokens`."""
        left = self._max_step_tokens
        behind, starts, lengths = [], [], []
        for sequence in sequences:
            missing = len(sequence.tokens) - self._num_left - sequence.num_in_draft
            if missing > MAX_FED - self._num_left and left > 0 and len(sequence.tokens) <= self._max_length:
                behind.append(sequence)
                starts.append(sequence.num_in_draft)
                lengths.append(min(missing, left))
                left -= lengths[-1]
        if not behind:
            return
        inputs = self._inputs.prefill(behind, starts, lengths)
        if self._rings is not None:
            inputs.state_slots_S = self._rings.copy(behind, starts, np.add(starts, lengths).tolist())
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
        states_PS: Tensor | None = None
        if self._rings is not None:
            # Of the token before the first, and of all tokens. Sequences without proposals change nothing.
            places_P = np.arange(-1, places_J.shape[0])
            slots_SP = self._rings.slots(sequences, first_S[:, None] + places_P)
            states_PS = to_tensor(np.where(np.array(lengths)[:, None] > 0, slots_SP, 0).T)
            ends_T = states_PS[1 : 1 + num_fed].t().flatten()
            first = replace(first, state_slots_S=states_PS[0].clone(), state_ends_T=ends_T)
            states_PS = states_PS[num_fed:]
        return DraftRound(first, positions_JS, slots_JS, positions_JS + 1, to_tensor(query_starts), states_PS)

    def _sample_round(self, sequences: Many[Sequence], round_: DraftRound, lengths: list[int]) -> Proposal:
        states = [sequence.sampling for sequence in sequences]
        greedy = self._backend.greedy
        if greedy is not None and self._rings is None and self._sampler.takes_argmax(states):
            return Proposal(greedy.argmax_steps(round_.first, round_.positions_JS, round_.slots_JS).T, lengths, None)
        num_ahead = 1 + round_.positions_JS.shape[0]
        return sample_round(self._sampler, states, lengths, num_ahead, partial(self._logits, round_))

    def _logits(self, round_: DraftRound, place: int, last_S: Tensor | None) -> Tensor:
        """The draft's logits [S, V] for a place."""
        if last_S is not None:
            return self._backend.decode(round_.later(place, last_S))
        num_fed = round_.first.query_len
        return self._backend.decode(round_.first)[num_fed - 1 :: num_fed]


@dataclass(frozen=True, slots=True)
class DraftRound:
    """The inputs of a round's passes: the first over the tokens that the draft has not seen, then one token each."""

    first: StepInputs
    positions_JS: Tensor
    slots_JS: Tensor
    context_lens_JS: Tensor
    query_starts: Tensor
    states_PS: Tensor | None  # where the states after the last token of the first pass are, and after further ones

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
            state_slots_S=None if self.states_PS is None else self.states_PS[place - 1],
            state_ends_T=None if self.states_PS is None else self.states_PS[place],
        )
