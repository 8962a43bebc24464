"""InputBuilder: sequences → StepInputs, the tensors of one forward pass.

Inputs are built on the host; the backend copies them to its device.

Shapes: T tokens of the step, one sequence after another · S sequences · K tokens proposed for each · Q = K + 1 ·
B blocks of the longest sequence
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.executor.image_positions import rotary_positions
from flambeau.llm.models.step_media import StepMedia

Ints = NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """Which tokens are computed, where their keys and values go, and what each token attends to."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts: Tensor  # [S+1]: where the tokens of each sequence begin
    context_lens_S: Tensor  # tokens of each sequence up to the last of this step, padding included
    block_tables_SB: Tensor
    # Tokens of every sequence in this step; 0: each sequence has its own number.
    query_len: int = field(default=0, kw_only=True)
    # The number of the adapter of each token, always on the host; None: no token has one.
    adapters_T: Tensor | None = field(default=None, kw_only=True)
    # Where the states of each sequence are; None: the network has none.
    state_slots_S: Tensor | None = field(default=None, kw_only=True)
    # Where the state after each token goes; None: the one after the last token of a sequence goes where it came from.
    state_ends_T: Tensor | None = field(default=None, kw_only=True)
    media: StepMedia | None = field(default=None, kw_only=True)  # of prompts, never in decode steps
    # The row of each sequence in the block tables, always on the host: backends may keep states by it.
    rows_S: Tensor | None = field(default=None, kw_only=True)
    # Of prompts: the tokens of the longest sequence, computed or not. The rotary factors of longrope depend on it.
    longest: int = field(default=0, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors but adapters and media, in the order that compiled steps take them."""
        places = self.ids_T, self.positions_T, self.slots_T
        states = [each for each in (self.state_slots_S, self.state_ends_T) if each is not None]
        return *places, self.query_starts, self.context_lens_S, self.block_tables_SB, *states

    def to(self, device: torch.device) -> StepInputs:
        if all(tensor.device == device for tensor in self.tensors):
            return self
        moved = [tensor.to(device, non_blocking=True) for tensor in self.tensors]
        media = None if self.media is None else self.media.to(device)
        kept = {"query_len": self.query_len, "rows_S": self.rows_S, "longest": self.longest}
        return step_inputs(moved, adapters_T=self.adapters_T, media=media, **kept)


def step_inputs(tensors: Rows[Tensor], **others: Any) -> StepInputs:
    """The counterpart of `StepInputs.tensors`; `others` are the fields that are not among them."""
    ids_T, positions_T, slots_T, query_starts, context_lens_S, block_tables_SB, *states = tensors
    return StepInputs(
        ids_T,
        positions_T,
        slots_T,
        query_starts,
        context_lens_S,
        block_tables_SB,
        state_slots_S=states[0] if states else None,
        state_ends_T=states[1] if len(states) > 1 else None,
        **others,
    )


class BlockTables:
    """The blocks of every running sequence, one row each; rows are updated, not rebuilt."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        self._table = np.zeros((num_rows, num_blocks), dtype=np.int64)
        self._written: dict[Sequence, tuple[int, list[int], int]] = {}  # → its row, its list of blocks, how many
        self._free = [*range(num_rows)]

    def rows(self, sequences: Rows[Sequence]) -> Ints:
        """The row of each sequence, up to date."""
        return np.array([self._row(sequence) for sequence in sequences])

    def _row(self, sequence: Sequence) -> int:
        row, blocks, number = self._written.get(sequence) or (self._free.pop(), [], 0)
        if blocks is not sequence.blocks:  # a new list: the sequence was preempted and starts again
            number = 0
        if len(sequence.blocks) != number:
            self._table[row, number : len(sequence.blocks)] = sequence.blocks[number:]
            self._written[sequence] = (row, sequence.blocks, len(sequence.blocks))
        return row

    def forget(self, sequence: Sequence) -> int | None:
        """Free the row of a sequence, and return it; None: it has none."""
        entry = self._written.pop(sequence, None)
        if entry is None:
            return None
        self._free.append(entry[0])
        return entry[0]

    def columns(self, rows: Ints, number: int) -> Ints:
        """The first `number` blocks of these rows."""
        return self._table[rows, :number]

    def slots(self, rows: Ints, positions: Ints, block_size: int) -> Ints:
        """Where the key and value of each position are: block times block size plus offset."""
        blocks, offsets = np.divmod(positions, block_size)
        places: Ints = self._table[rows, blocks] * block_size + offsets
        return places


class InputBuilder:
    """Builds the inputs of decode and prefill passes from block tables that it keeps between steps."""

    def __init__(self, *, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tables = BlockTables(max_num_seqs, max_blocks)

    def decode_next(self, sequences: Rows[Sequence], ids_S: Tensor) -> StepInputs:
        """The tokens `ids_S`, each of which comes after those that its sequence has."""
        rows = self.tables.rows(sequences)
        positions_S = np.array([len(s.tokens) for s in sequences])
        slots_S = self.tables.slots(rows, positions_S, self.block_size)
        return self._step(ids_S, positions_S, slots_S, positions_S + 1, rows, sequences)

    def decode(self, sequences: Rows[Sequence], ids_SK: Tensor | None = None, lengths: Rows[int] = ()) -> StepInputs:
        """The last token of each sequence, then the proposed ones, of which the first `lengths` count."""
        rows = self.tables.rows(sequences)
        last_S = np.array([len(s.tokens) - 1 for s in sequences])
        ids_SQ = to_tensor(np.array([[s.tokens[-1]] for s in sequences]))
        if ids_SK is None:
            positions_SQ, slots_SQ = last_S, self.tables.slots(rows, last_S, self.block_size)
        else:
            ids_SQ = torch.cat([ids_SQ.to(ids_SK.device), ids_SK], 1)
            places_Q = np.arange(ids_SQ.shape[1])
            is_real_SQ = None if min(lengths) == ids_SK.shape[1] else places_Q <= np.array(lengths)[:, None]
            positions_SQ, slots_SQ = self.positions_and_slots(rows, last_S[:, None] + places_Q, is_real_SQ)
        # Padding counts: kernels take the tokens of a step for the last ones of their context.
        context_lens_S = last_S + ids_SQ.shape[1]
        places = positions_SQ.reshape(-1), slots_SQ.reshape(-1)
        return self._step(ids_SQ.flatten(), *places, context_lens_S, rows, sequences)

    def _step(
        self,
        ids_T: Tensor,
        positions_T: Ints,
        slots_T: Ints,
        context_lens_S: Ints,
        rows: Ints,
        sequences: Rows[Sequence],
    ) -> StepInputs:
        """The inputs of a step in which every sequence has the same number of tokens."""
        num_tokens = len(positions_T)
        query_len = num_tokens // len(rows)
        adapters_S = adapters_of(sequences)
        num_blocks = -(-int(context_lens_S.max()) // self.block_size)
        return StepInputs(
            ids_T,
            to_tensor(positions_T),
            to_tensor(slots_T),
            to_tensor(np.arange(0, num_tokens + 1, query_len)),
            to_tensor(context_lens_S),
            to_tensor(self.tables.columns(rows, num_blocks)),
            query_len=query_len,
            adapters_T=None if adapters_S is None else to_tensor(np.repeat(adapters_S, query_len)),
            rows_S=to_tensor(rows),
            state_slots_S=state_slots_of(sequences),
            state_ends_T=state_ends_of(sequences, query_len),
        )

    def positions_and_slots(
        self, rows: Ints, positions_SQ: Ints, is_real_SQ: NDArray[np.bool_] | None
    ) -> tuple[Ints, Ints]:
        """Positions and slots; padding gets position 0 and slot 0, which nothing reads. None: no padding."""
        if is_real_SQ is None:
            return positions_SQ, self.tables.slots(rows[:, None], positions_SQ, self.block_size)
        positions_SQ = np.where(is_real_SQ, positions_SQ, 0)
        slots_SQ = self.tables.slots(rows[:, None], positions_SQ, self.block_size)
        return positions_SQ, np.where(is_real_SQ, slots_SQ, 0)

    def prefill(self, sequences: Rows[Sequence], starts: Rows[int], lengths: Rows[int]) -> StepInputs:
        """`lengths` tokens of each sequence, beginning at `starts`."""
        spans = [*zip(starts, lengths, strict=True)]
        ids_T = np.concatenate([s.tokens[start : start + n] for s, (start, n) in zip(sequences, spans, strict=True)])
        positions_T = np.concatenate([np.arange(start, start + n) for start, n in spans])
        rows = self.tables.rows(sequences)
        slots_T = self.tables.slots(np.repeat(rows, lengths), positions_T, self.block_size)
        context_lens_S = np.add(starts, lengths)
        adapters_S = adapters_of(sequences)
        return StepInputs(
            to_tensor(ids_T),
            to_tensor(positions_T),
            to_tensor(slots_T),
            to_tensor(np.concatenate(([0], np.cumsum(lengths)))),
            to_tensor(context_lens_S),
            to_tensor(self.tables.columns(rows, -(-int(context_lens_S.max()) // self.block_size))),
            adapters_T=None if adapters_S is None else to_tensor(np.repeat(adapters_S, lengths)),
            rows_S=to_tensor(rows),
            state_slots_S=state_slots_of(sequences),
            longest=max(len(sequence.tokens) for sequence in sequences),
        )


def media_of(sequences: Rows[Sequence], starts: Rows[int], lengths: Rows[int]) -> StepMedia | None:
    """The files in `lengths` tokens of each sequence from `starts` on; None: this is a step as of texts."""
    if not any(sequence.media for sequence in sequences):
        return None
    rows: list[Ints] = []
    features: list[Tensor] = []
    last_seen = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    first_row, has_whole = 0, False
    for sequence, start, length, seen in zip(sequences, starts, lengths, last_seen, strict=True):
        for one in sequence.media:
            begin, end = max(start, one.start), min(start + length, one.end)
            if begin < end:
                rows.append(np.arange(begin, end) - start + first_row)
                features.append(one.encoded.features[begin - one.start + one.first : end - one.start + one.first])
            if begin < end and one.is_whole:
                assert end == one.end, "an image is divided between two chunks"
                has_whole = True
                seen[begin - start : end - start] = one.end - 1
        first_row += length
    rotary_3T = rotary_of(sequences, starts, lengths)
    if not rows and rotary_3T is None:
        return None
    return StepMedia(
        to_tensor(np.concatenate(rows)) if rows else torch.zeros(0, dtype=torch.int64),
        side_by_side(features) if features else torch.zeros(0, 0),
        to_tensor(np.concatenate(last_seen)) if has_whole else None,
        rotary_3T,
    )


def side_by_side(features: list[Tensor]) -> Tensor:
    """Those of all files; those of sounds are narrower where layers add features of images."""
    width = max(one.shape[1] for one in features)
    return torch.cat([functional.pad(one, (0, width - one.shape[1])) for one in features])


def rotary_of(sequences: Rows[Sequence], starts: Rows[int], lengths: Rows[int]) -> Tensor | None:
    """What rotates the tokens of a step [3, T], if that differs from their positions."""
    found = [rotary_positions(s.media, *span) for s, *span in zip(sequences, starts, lengths, strict=True)]
    if all(one is None for one in found):
        return None
    plain = (np.tile(np.arange(start, start + length), (3, 1)) for start, length in zip(starts, lengths, strict=True))
    return to_tensor(np.concatenate([p if one is None else one for p, one in zip(plain, found, strict=True)], axis=1))


def adapters_of(sequences: Rows[Sequence]) -> Ints | None:
    """The numbers of their adapters; None if none has one."""
    numbers = [sequence.adapter for sequence in sequences]
    return np.array(numbers) if any(numbers) else None


def state_slots_of(sequences: Rows[Sequence]) -> Tensor | None:
    """Where their states are; None if they have none."""
    slots = [sequence.state_slot for sequence in sequences]
    return torch.tensor(slots) if slots and slots[0] else None


def state_ends_of(sequences: Rows[Sequence], query_len: int) -> Tensor | None:
    """Where the states after the last token of each sequence and after the proposed ones go; None: in one place."""
    if query_len == 1 or not sequences[0].state_slot:
        return None
    assert all(len(sequence.spare_slots) >= query_len - 1 for sequence in sequences), "states would be overwritten"
    return torch.tensor([slot for s in sequences for slot in (s.state_slot, *s.spare_slots[: query_len - 1])])


def to_tensor(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
