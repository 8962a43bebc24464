"""Runner: a plan's tokens → the tensors of a forward pass → logits.

Shapes: T tokens of the step · S sequences · Q tokens of each · B blocks · N rows whose logits are wanted · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.forward import Forward
from flambeau.llm.scheduler import Chunk
from flambeau.llm.sequence import Sequence
from flambeau.llm.step_inputs import StepInputs

Ints = NDArray[np.int64]


class BlockTables:
    """The blocks of every running sequence, one row each, kept up to date instead of built anew."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        self._table = np.zeros((num_rows, num_blocks), dtype=np.int64)
        self._written: dict[Sequence, tuple[int, list[int], int]] = {}  # → its row, its list of blocks, how many
        self._free = [*range(num_rows)]

    def rows(self, sequences: Rows[Sequence]) -> Ints:
        """The row of each sequence, with its blocks as they are now."""
        return np.fromiter((self._row(sequence) for sequence in sequences), dtype=np.int64, count=len(sequences))

    def _row(self, sequence: Sequence) -> int:
        row, blocks, number = self._written.get(sequence) or (self._free.pop(), [], 0)
        if blocks is not sequence.blocks:  # a new list: it was preempted, and begins again
            number = 0
        if len(sequence.blocks) != number:
            self._table[row, number : len(sequence.blocks)] = sequence.blocks[number:]
            self._written[sequence] = (row, sequence.blocks, len(sequence.blocks))
        return row

    def forget(self, sequence: Sequence) -> None:
        """Its row is free for another."""
        if entry := self._written.pop(sequence, None):
            self._free.append(entry[0])

    def columns(self, rows: Ints, number: int) -> Ints:
        """The first blocks of these rows."""
        return self._table[rows, :number]

    def slots(self, rows: Ints, positions: Ints, block_size: int) -> Ints:
        """Where the key and value of a position of each row's sequence lies."""
        places: Ints = self._table[rows, positions // block_size] * block_size + positions % block_size
        return places


class Runner:
    """Builds the inputs of decode and prefill passes; knows which row of the block tables is whose."""

    def __init__(self, forward: Forward, *, max_num_seqs: int, max_blocks: int, block_size: int, device: str) -> None:
        self.forward = forward
        self.block_size = block_size
        self.tables = BlockTables(max_num_seqs, max_blocks)
        self._device = torch.device(device)

    def decode(self, sequences: Rows[Sequence], drafts: Rows[Rows[int]] = (), length: int = 1) -> Tensor:
        """The logits [S·length, V] after the last token of each, and after each drafted one; padded to length."""
        return self.forward.decode(self.decode_inputs(sequences, drafts, length))

    def decode_inputs(self, sequences: Rows[Sequence], drafts: Rows[Rows[int]], length: int) -> StepInputs:
        """The tensors of that pass."""
        rows = self.tables.rows(sequences)
        last_S = np.fromiter((len(s.tokens) - 1 for s in sequences), dtype=np.int64, count=len(sequences))
        if length == 1:
            ids_SQ = np.fromiter((s.tokens[-1] for s in sequences), dtype=np.int64, count=len(sequences))[:, None]
            positions_SQ = last_S[:, None]
            slots_SQ = self.tables.slots(rows, last_S, self.block_size)[:, None]
        else:
            ids_SQ, is_real_SQ = padded(sequences, drafts, length)
            positions_SQ = np.where(is_real_SQ, last_S[:, None] + np.arange(length), 0)
            slots_SQ = self.tables.slots(rows[:, None], positions_SQ, self.block_size)
            slots_SQ = np.where(is_real_SQ, slots_SQ, 0)
        context_lens_S = positions_SQ.max(axis=1) + 1
        num_blocks = -(-int(context_lens_S.max()) // self.block_size)
        return StepInputs(
            self._tensor(ids_SQ.reshape(-1)),
            self._tensor(positions_SQ.reshape(-1)),
            self._tensor(slots_SQ.reshape(-1)),
            self._tensor(np.arange(len(sequences) + 1) * length),
            self._tensor(context_lens_S),
            self._tensor(self.tables.columns(rows, num_blocks)),
            query_len=length,
        )

    def prefill(self, chunks: Rows[Chunk]) -> Tensor:
        """The logits [N, V] after those chunks that are the last of their sequence."""
        inputs = self.prefill_inputs(chunks)
        ends = np.cumsum([chunk.length for chunk in chunks]) - 1
        rows_N = ends[[chunk.is_last for chunk in chunks]]
        return self.forward.prefill(inputs, self._tensor(rows_N))

    def prefill_inputs(self, chunks: Rows[Chunk]) -> StepInputs:
        """The tensors of that pass."""
        lengths = np.array([chunk.length for chunk in chunks])
        starts = np.array([chunk.sequence.num_computed for chunk in chunks])
        ids_T = np.concatenate([c.sequence.tokens[c.sequence.num_computed :][: c.length] for c in chunks])
        positions_T = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        rows = self.tables.rows([chunk.sequence for chunk in chunks])
        slots_T = self.tables.slots(np.repeat(rows, lengths), positions_T, self.block_size)
        context_lens_S = starts + lengths
        return StepInputs(
            self._tensor(ids_T),
            self._tensor(positions_T),
            self._tensor(slots_T),
            self._tensor(np.concatenate(([0], np.cumsum(lengths)))),
            self._tensor(context_lens_S),
            self._tensor(self.tables.columns(rows, -(-int(context_lens_S.max()) // self.block_size))),
        )

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def padded(sequences: Rows[Sequence], drafts: Rows[Rows[int]], length: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The last token of each sequence and the drafted ones after it, filled up; and which of them are real."""
    ids_SQ = np.zeros((len(sequences), length), dtype=np.int64)
    for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
        ids_SQ[i, 0] = sequence.tokens[-1]
        ids_SQ[i, 1 : 1 + len(draft)] = draft
    lengths = np.array([1 + len(draft) for draft in drafts])
    return ids_SQ, np.arange(length) < lengths[:, None]
