"""StateBackend: layers of transformers with a state for each sequence, beside layers with paged attention.

All sequences that decode are one pass. A prompt is a pass of its own: the tokens of a state follow one another.

Shapes: T tokens of the step · N rows of them · S sequences · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.hugging_face.attention import PAGED, AttentionLayer, LayerCache, PagedLayers
from flambeau.llm.backends.hugging_face.causal_model import CausalModel, kept_by
from flambeau.llm.executor.backend import AsyncDecoder, Greedy
from flambeau.llm.executor.inputs import StepInputs


class StateBackend:
    """Keeps a cache without keys for each row of the block tables, or a stacked one for those that decode."""

    greedy: Greedy | None = None
    async_decoder: AsyncDecoder | None = None

    def __init__(self, model: CausalModel, layers: Sequence[AttentionLayer], cache: LayerCache) -> None:
        from flambeau.llm.backends.hugging_face import state_cache  # imports transformers

        self._caches = state_cache
        self._model = model
        self._attention = PagedLayers(layers, cache)
        self._states: dict[int, dict[str, Any]] = {}
        self._decoding: tuple[int | None, ...] = ()  # the rows of the stacked states; None: it has left
        self._stacked: dict[str, Any] = {}
        self.model: nn.Module = model.module
        self.device = model.device
        ways = "paged attention and a state" if layers else "a state"
        self.decode_path = f"transformers ({type(model.network).__name__}) with {ways} for each sequence"
        if layers:
            model.network.set_attn_implementation(PAGED)

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        assert inputs.query_len == 1, "a state cannot be taken back, so nothing may be proposed"
        assert inputs.rows_S is not None
        self._gather(tuple(inputs.rows_S.tolist()))
        inputs = inputs.to(self.device)
        logits_S1V, self._stacked = self._run(inputs, (len(inputs.ids_T), 1), self._stacked, torch.tensor([0]))
        return logits_S1V[:, 0]

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        assert inputs.rows_S is not None
        starts, pieces, places = inputs.query_starts.tolist(), [], []
        for i, row in enumerate(inputs.rows_S.tolist()):
            start, end = starts[i], starts[i + 1]
            wanted = ((rows_N >= start) & (rows_N < end)).nonzero().flatten()
            if int(inputs.positions_T[start]) == 0:
                self.forget_row(row)
                self._states[row] = self._caches.without_keys(self._model.new_cache())
            self._release(row)
            rows = rows_N[wanted] - start if len(wanted) else torch.tensor([0])
            alone = sequence_inputs(inputs, i, start, end).to(self.device)
            logits_1NV, self._states[row] = self._run(alone, (1, end - start), self._states[row], rows)
            pieces.append(logits_1NV[0, : len(wanted)])
            places.append(wanted)
        return torch.cat(pieces)[torch.cat(places).argsort().to(self.device)]

    def forget_row(self, row: int) -> None:
        """Free the state of a sequence that has left."""
        self._states.pop(row, None)
        self._leave_stack(row)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs in the background."""

    def _gather(self, rows: tuple[int, ...]) -> None:
        """Stack the states of these rows, unless they are stacked already."""
        if rows == self._decoding:
            return
        for row in self._decoding:
            if row is not None:
                self._release(row)
        states = [self._states.pop(row) for row in rows]
        self._stacked, self._decoding = self._caches.stack(states), rows

    def _release(self, row: int) -> None:
        """Take a row's state out of the stacked ones."""
        if row in self._decoding:
            self._states[row] = self._caches.take(self._stacked, self._decoding.index(row))
            self._leave_stack(row)

    def _leave_stack(self, row: int) -> None:
        """Mark a row of the stacked states as unused; they are freed with the last one."""
        self._decoding = tuple(None if one == row else one for one in self._decoding)
        if not any(one is not None for one in self._decoding):
            self._decoding, self._stacked = (), {}

    def _run(
        self, inputs: StepInputs, shape: tuple[int, int], kept: dict[str, Any], rows_N: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits, and what is kept afterwards."""
        passed: dict[str, Any] = {"input_ids": inputs.ids_T.view(shape), "use_cache": True, **kept}
        if self._model.takes_positions:
            passed["position_ids"] = inputs.positions_T.view(shape)
        self._attention.inputs = inputs
        try:
            logits, outputs = self._model.run(passed, rows_N.to(self.device))
        finally:
            self._attention.inputs = None
        return logits, kept_by(outputs) or kept


def sequence_inputs(inputs: StepInputs, i: int, start: int, end: int) -> StepInputs:
    """The inputs of one sequence of a step."""
    return StepInputs(
        inputs.ids_T[start:end],
        inputs.positions_T[start:end],
        inputs.slots_T[start:end],
        torch.tensor([0, end - start]),
        inputs.context_lens_S[i : i + 1],
        inputs.block_tables_SB[i : i + 1],
    )
