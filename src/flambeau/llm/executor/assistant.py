"""AssistantProposer: a head proposes from the last hidden states of the target, and from its keys and values.

Nothing is kept but the last hidden state of each sequence. All passes of a round are at the place of the sequence's
last token, whose keys and values the target has not computed yet.

Shapes: S sequences · B hidden of the target · X numbers of hidden states
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.executor.head import HeadModel, HeadRound
from flambeau.llm.executor.inputs import InputBuilder, StepInputs, to_tensor
from flambeau.llm.models.assistant_head import AssistantHead, TargetKeys
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.rounds import sample_round
from flambeau.llm.speculation.speculator import Proposal, TokenSpan


@dataclass(frozen=True, slots=True)
class LastState:
    """The hidden state of the newest token of a sequence that the target has computed."""

    position: int
    state_X: Tensor


class AssistantProposer:
    """Proposes what the head samples with the random numbers that the target will use."""

    reads_states = True

    def __init__(self, model: HeadModel, inputs: InputBuilder, sampler: Sampler) -> None:
        assert isinstance(model.head, AssistantHead)
        self._model, self._head = model, model.head
        self._inputs, self._sampler = inputs, sampler
        self._device, self._dtype = model.cache.keys[0].device, model.head.state_dtype
        self._last: dict[Sequence, LastState] = {}

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Keep the last hidden state of each sequence."""
        states_TX = self._model.states.take()
        for span in spans:
            end = span.row + span.length
            self._last[span.sequence] = LastState(span.start + span.length - 1, states_TX[end - 1 : end].clone())

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence whose hidden state is known; None: for none."""
        lengths = [limit if self._is_known(s) else 0 for s, limit in zip(sequences, limits, strict=True)]
        if not any(lengths):
            return None
        states = [sequence.sampling for sequence in sequences]
        round_ = self._round(sequences)
        if not self._sampler.takes_argmax(states):
            return sample_round(self._sampler, states, lengths, num_ahead, round_.logits)
        return Proposal(round_.most_likely(num_ahead), lengths, None)

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Nothing to do: the head keeps nothing of what it has proposed."""

    def forget(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def _is_known(self, sequence: Sequence) -> bool:
        """Whether the hidden state of the token before the last is known."""
        last = self._last.get(sequence)
        return last is not None and last.position == len(sequence.tokens) - 2

    def _round(self, sequences: Many[Sequence]) -> AssistantRound:
        """A round of all sequences; those whose hidden states are not known read zeros."""
        builder = self._inputs
        last_S = np.array([len(sequence.tokens) - 1 for sequence in sequences])
        known_S = np.array([self._is_known(sequence) for sequence in sequences])
        lengths_S = np.where(known_S, last_S, 1)  # of what is attended to
        rows = builder.tables.rows(sequences)
        inputs = StepInputs(
            to_tensor(np.array([sequence.tokens[-1] for sequence in sequences])),
            to_tensor(lengths_S - 1),
            to_tensor(np.zeros_like(last_S)),  # of padding: keys and values are only read
            to_tensor(np.arange(len(sequences) + 1)),
            to_tensor(lengths_S),
            to_tensor(builder.tables.columns(rows, -(-int(lengths_S.max()) // builder.block_size))),
            query_len=1,
        ).to(self._device)
        some = next(self._last[s].state_X for s, is_known in zip(sequences, known_S, strict=True) if is_known)
        zeros = torch.zeros_like(some)
        states_SX = torch.cat(
            [self._last[s].state_X if is_known else zeros for s, is_known in zip(sequences, known_S, strict=True)]
        )
        hidden_SB = self._head.combine(states_SX.to(self._dtype))
        return AssistantRound(self._model, inputs, to_tensor(last_S).to(self._device), hidden_SB)


class AssistantRound(HeadRound):
    """The passes of one round, all at the same places."""

    def __init__(self, model: HeadModel, inputs: StepInputs, places_S: Tensor, hidden_SB: Tensor) -> None:
        assert isinstance(model.head, AssistantHead)
        self._assistant, self._places_S = model.head, places_S
        self._attend = TargetKeys(model.attention(model.cache, inputs), model.head.arch.num_layers)
        super().__init__((), self._pass, model.head)
        self.hidden_SE = self._pass(inputs.ids_T, hidden_SB)

    def _pass(self, ids_S: Tensor, hidden_SB: Tensor) -> Tensor:
        return self._assistant(ids_S, hidden_SB, self._places_S, self._attend)  # type: ignore[no-any-return]

    def _advance(self, place: int, last_S: Tensor | None) -> None:
        if last_S is not None:
            self.hidden_SE = self._pass(last_S, self._assistant.further(self.hidden_SE))
