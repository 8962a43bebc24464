"""HeadProposer: a head proposes the next tokens from the hidden states that the target has computed anyway.

The head has an entry for each token that the target has computed: the token's hidden states together with the token
after it. The keys and values of entries are in the target's blocks, at the token's own place. Entries of new tokens
wait until the token after them is known, and until there is a reason to compute them: a proposal, or a block of them.

Shapes: S sequences · T entries of a pass · K tokens proposed · X numbers of hidden states · E hidden · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.executor.inputs import InputBuilder, StepInputs, to_tensor
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.attention import Attend
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.rounds import sample_round
from flambeau.llm.speculation.speculator import Proposal, TokenSpan

AttentionFactory = Callable[[KVCache, StepInputs], Attend]


@dataclass(frozen=True, slots=True)
class HeadModel:
    """A head, its cache in the target's blocks, and the hidden states that the target's backend writes."""

    head: DraftHead
    cache: KVCache
    states: HiddenStates
    attention: AttentionFactory


@dataclass(slots=True)
class WaitingEntries:
    """Hidden states of the newest tokens of a sequence, whose entries are not computed yet."""

    start: int  # the position of the first
    parts: list[Tensor] = field(default_factory=list)  # [T, X] each
    length: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    def add(self, states_TX: Tensor) -> None:
        self.parts.append(states_TX)
        self.length += len(states_TX)

    def num_ready(self, sequence: Sequence) -> int:
        """Those whose next token is known."""
        return min(self.end, len(sequence.tokens) - 1) - self.start

    def take(self, number: int) -> Tensor:
        """Remove the first ones: [number, X]."""
        states_TX = torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]
        rest = states_TX[number:]
        self.parts = [rest.clone()] if len(rest) else []  # what is left does not keep all of a prompt in memory
        self.start, self.length = self.start + number, len(rest)
        return states_TX[:number]


class HeadProposer:
    """Proposes what the head samples with the random numbers that the target will use."""

    reads_states = True

    def __init__(self, model: HeadModel, inputs: InputBuilder, sampler: Sampler) -> None:
        self._model, self._head = model, model.head
        self._inputs, self._sampler = inputs, sampler
        self._device = model.cache.keys[0].device
        self._waiting: dict[Sequence, WaitingEntries] = {}

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Keep the hidden states of these tokens; a block of entries is computed at once."""
        states_TX = self._model.states.take()
        due = []
        for span in spans:
            waiting = self._waiting.get(span.sequence)
            if waiting is None or waiting.end != span.start:  # entries before it are in a prefix that another computed
                waiting = self._waiting[span.sequence] = WaitingEntries(span.start)
            waiting.add(states_TX[span.row : span.row + span.length])
            if waiting.num_ready(span.sequence) >= self._inputs.block_size - 1:
                due.append(span.sequence)
        if due:
            self._catch_up(due)

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence whose hidden states are known; None: for none."""
        lengths = [limit if self._is_known(s) else 0 for s, limit in zip(sequences, limits, strict=True)]
        if not any(lengths):
            return None
        first, places_S, states_TX = self._first_pass(sequences)
        round_ = HeadRound(self._later_passes(sequences, lengths, num_ahead), self._run, self._head)
        round_.hidden_SE = self._run(first, self._head.combine(states_TX))[places_S]
        states = [sequence.sampling for sequence in sequences]
        if not self._sampler.takes_argmax(states):
            return sample_round(self._sampler, states, lengths, num_ahead, round_.logits)
        return Proposal(round_.most_likely(num_ahead), lengths, None)

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Nothing to do: entries of proposed tokens are computed again from the target's hidden states."""

    def forget(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)

    def _is_known(self, sequence: Sequence) -> bool:
        """Whether hidden states up to the token before the last wait, with the last token as the next one."""
        waiting = self._waiting.get(sequence)
        return waiting is not None and waiting.length > 0 and waiting.end == len(sequence.tokens) - 1

    def _run(self, inputs: StepInputs, hidden_TE: Tensor) -> Tensor:
        """The head's hidden states [T, E] of these entries; their keys and values are written."""
        inputs = inputs.to(self._device)
        attend = self._model.attention(self._model.cache, inputs)
        return self._head(inputs.ids_T, hidden_TE, inputs.positions_T, attend)  # type: ignore[no-any-return]

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute all entries of these sequences whose next token is known."""
        waiting = [self._waiting[sequence] for sequence in sequences]
        lengths = [each.num_ready(sequence) for each, sequence in zip(waiting, sequences, strict=True)]
        inputs = self._inputs.prefill(sequences, [each.start for each in waiting], lengths)
        inputs.ids_T = next_ids(sequences, waiting, lengths)
        states_TX = torch.cat([each.take(length) for each, length in zip(waiting, lengths, strict=True)])
        self._run(inputs, self._head.combine(states_TX))

    def _first_pass(self, sequences: Many[Sequence]) -> tuple[StepInputs, Tensor, Tensor]:
        """The entries that wait, as many places for each sequence, where its last one is, and all hidden states.

        A sequence whose hidden states are not known has only padding.
        """
        waiting = [self._waiting[s] if self._is_known(s) else WaitingEntries(0) for s in sequences]
        counts_S = np.array([each.length for each in waiting])
        width = int(counts_S.max())
        is_real_SF = np.arange(width) < counts_S[:, None]
        rows = self._inputs.tables.rows(sequences)
        starts_S = np.array([each.start for each in waiting])
        positions_SF, slots_SF = self._inputs.positions_and_slots(
            rows, starts_S[:, None] + np.arange(width), is_real_SF
        )
        ids_SF = np.zeros(is_real_SF.shape, dtype=np.int64)
        ids_SF[is_real_SF] = next_ids(sequences, waiting, counts_S.tolist()).numpy()
        context_lens_S = starts_S + width  # padding counts
        num_blocks = -(-int(context_lens_S.max()) // self._inputs.block_size)
        inputs = StepInputs(
            to_tensor(ids_SF.reshape(-1)),
            to_tensor(positions_SF.reshape(-1)),
            to_tensor(slots_SF.reshape(-1)),
            to_tensor(np.arange(len(rows) + 1) * width),
            to_tensor(context_lens_S),
            to_tensor(self._inputs.tables.columns(rows, num_blocks)),
            query_len=width,
        )
        taken_TX = torch.cat([each.take(each.length) for each in waiting if each.length])
        places_S = to_tensor(np.arange(len(rows)) * width + np.maximum(counts_S, 1) - 1).to(self._device)
        if is_real_SF.all():
            return inputs, places_S, taken_TX
        states_TX = taken_TX.new_zeros(is_real_SF.size, taken_TX.shape[1])
        states_TX[to_tensor(is_real_SF.reshape(-1).nonzero()[0]).to(self._device)] = taken_TX
        return inputs, places_S, states_TX

    def _later_passes(self, sequences: Many[Sequence], lengths: Many[int], num_ahead: int) -> list[StepInputs]:
        """The passes after the first, one entry for each sequence; the ids are not known yet."""
        rows = self._inputs.tables.rows(sequences)
        last_S = np.array([len(sequence.tokens) - 2 for sequence in sequences])
        places_J = np.arange(1, num_ahead)
        is_real_SJ = places_J < np.array(lengths)[:, None]
        positions_SJ, slots_SJ = self._inputs.positions_and_slots(rows, last_S[:, None] + places_J, is_real_SJ)
        num_blocks = -(-int(positions_SJ.max(initial=0) + 1) // self._inputs.block_size)
        tables_SB = to_tensor(self._inputs.tables.columns(rows, num_blocks)).to(self._device)
        starts = to_tensor(np.arange(len(rows) + 1)).to(self._device)
        positions_JS, slots_JS = to_tensor(positions_SJ.T).to(self._device), to_tensor(slots_SJ.T).to(self._device)
        return [
            StepInputs(positions_S, positions_S, slots_S, starts, positions_S + 1, tables_SB, query_len=1)
            for positions_S, slots_S in zip(positions_JS, slots_JS, strict=True)
        ]


class HeadRound:
    """The passes of one round, each from the hidden states of the one before."""

    def __init__(self, later: Many[StepInputs], run: Callable[[StepInputs, Tensor], Tensor], head: DraftHead) -> None:
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


def next_ids(sequences: Many[Sequence], waiting: Many[WaitingEntries], lengths: Many[int]) -> Tensor:
    """The tokens after those that wait, one sequence after another."""
    spans = zip(sequences, waiting, lengths, strict=True)
    return to_tensor(np.concatenate([np.array(s.tokens[w.start + 1 : w.start + 1 + n], np.int64) for s, w, n in spans]))
