"""Runner: a plan's tokens → the tensors of a forward pass → logits.

Shapes: T tokens of the step · S sequences · K tokens proposed for each · Q = K + 1 · B blocks · N rows whose logits are
wanted · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.compute.forward import Forward, Greedy
from flambeau.llm.compute.step_inputs import StepInputs
from flambeau.llm.scheduling.scheduler import Chunk
from flambeau.llm.scheduling.sequence import Sequence

Ints = NDArray[np.int64]


class BlockTables:
    """The blocks of every running sequence, one row each, kept up to date instead of built anew."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        self._table = np.zeros((num_rows, num_blocks), dtype=np.int64)
        self._written: dict[Sequence, tuple[int, list[int], int]] = {}  # → its row, its list of blocks, how many
        self._free = [*range(num_rows)]

    def rows(self, sequences: Rows[Sequence]) -> Ints:
        """The row of each sequence, with its blocks as they are now."""
        return np.array([self._row(sequence) for sequence in sequences])

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
        blocks, offsets = np.divmod(positions, block_size)
        places: Ints = self._table[rows, blocks] * block_size + offsets
        return places


class Runner:
    """Builds the inputs of decode and prefill passes; knows which row of the block tables is whose."""

    def __init__(self, forward: Forward, *, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.forward = forward
        self.block_size = block_size
        self.tables = BlockTables(max_num_seqs, max_blocks)

    def decode(self, sequences: Rows[Sequence], ids_SK: Tensor | None = None, lengths: Rows[int] = ()) -> Tensor:
        """The logits [S·(1+K), V] after the last token of each and after the proposed ones; `lengths` of them count."""
        return self.forward.decode(self.decode_inputs(sequences, ids_SK, lengths))

    def choose(
        self, greedy: Greedy, sequences: Rows[Sequence], ids_SK: Tensor | None = None, lengths: Rows[int] = ()
    ) -> list[list[int]]:
        """The likeliest tokens there, 1 + K for each sequence."""
        inputs = self.decode_inputs(sequences, ids_SK, lengths)
        found: list[list[int]] = greedy.choose(inputs).view(-1, inputs.query_len).tolist()
        return found

    def decode_inputs(self, sequences: Rows[Sequence], ids_SK: Tensor | None, lengths: Rows[int]) -> StepInputs:
        """The tensors of that pass."""
        rows = self.tables.rows(sequences)
        last_S = np.array([len(s.tokens) - 1 for s in sequences])
        ids_SQ = self.tensor(np.array([[s.tokens[-1]] for s in sequences]))
        if ids_SK is None:
            positions_SQ, slots_SQ = last_S, self.tables.slots(rows, last_S, self.block_size)
        else:
            ids_SQ = torch.cat([ids_SQ.to(ids_SK.device), ids_SK], 1)
            places_Q = np.arange(ids_SQ.shape[1])
            is_real_SQ = None if min(lengths) == ids_SK.shape[1] else places_Q <= np.array(lengths)[:, None]
            positions_SQ, slots_SQ = self.real_places(rows, last_S[:, None] + places_Q, is_real_SQ)
        num_tokens = ids_SQ.numel()
        query_len = num_tokens // len(sequences)
        # Padding counts: a kernel takes the tokens of a step for the last ones of their context.
        context_lens_S = last_S + query_len
        num_blocks = -(-int(context_lens_S.max()) // self.block_size)
        return StepInputs(
            ids_SQ.flatten(),
            self.tensor(positions_SQ.reshape(-1)),
            self.tensor(slots_SQ.reshape(-1)),
            self.tensor(np.arange(0, num_tokens + 1, query_len)),
            self.tensor(context_lens_S),
            self.tensor(self.tables.columns(rows, num_blocks)),
            query_len=query_len,
        )

    def real_places(self, rows: Ints, positions_SQ: Ints, is_real_SQ: NDArray[np.bool_] | None) -> tuple[Ints, Ints]:
        """Positions and slots; of tokens that count for nothing, those where nobody looks. None: all count."""
        if is_real_SQ is None:
            return positions_SQ, self.tables.slots(rows[:, None], positions_SQ, self.block_size)
        positions_SQ = np.where(is_real_SQ, positions_SQ, 0)
        slots_SQ = self.tables.slots(rows[:, None], positions_SQ, self.block_size)
        return positions_SQ, np.where(is_real_SQ, slots_SQ, 0)

    def prefill(self, chunks: Rows[Chunk]) -> Tensor:
        """The logits [N, V] after those chunks that are the last of their sequence."""
        sequences = [chunk.sequence for chunk in chunks]
        inputs = self.prefill_inputs(sequences, [s.num_computed for s in sequences], [c.length for c in chunks])
        ends = np.cumsum([chunk.length for chunk in chunks]) - 1
        rows_N = ends[[chunk.is_last for chunk in chunks]]
        return self.forward.prefill(inputs, self.tensor(rows_N))

    def prefill_inputs(self, sequences: Rows[Sequence], starts: Rows[int], lengths: Rows[int]) -> StepInputs:
        """The tensors of a pass over so many tokens of each, from its start on."""
        spans = [*zip(starts, lengths, strict=True)]
        ids_T = np.concatenate([s.tokens[start : start + n] for s, (start, n) in zip(sequences, spans, strict=True)])
        positions_T = np.concatenate([np.arange(start, start + n) for start, n in spans])
        rows = self.tables.rows(sequences)
        slots_T = self.tables.slots(np.repeat(rows, lengths), positions_T, self.block_size)
        context_lens_S = np.add(starts, lengths)
        return StepInputs(
            self.tensor(ids_T),
            self.tensor(positions_T),
            self.tensor(slots_T),
            self.tensor(np.concatenate(([0], np.cumsum(lengths)))),
            self.tensor(context_lens_S),
            self.tensor(self.tables.columns(rows, -(-int(context_lens_S.max()) // self.block_size))),
        )

    def tensor(self, array: Ints) -> Tensor:
        """Whole numbers, on the host."""
        return torch.from_numpy(np.ascontiguousarray(array))
