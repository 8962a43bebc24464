"""SequenceBackend: one cache of transformers for each sequence, in a row of the engine's tables.

For networks whose attention does not use blocks, or that keep a state of their own (Mamba, RWKV and mixtures with
attention). Nothing is shared between sequences, and nothing is taken back.

Shapes: T tokens of the step · N rows of them · S sequences · V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flambeau.llm.backends.hugging_face.causal_model import CausalModel, SequenceState
from flambeau.llm.executor.backend import AsyncDecoder, Greedy
from flambeau.llm.executor.inputs import StepInputs


class SequenceBackend:
    """Runs the network once for each sequence of a step."""

    greedy: Greedy | None = None
    async_decoder: AsyncDecoder | None = None

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._states: dict[int, SequenceState] = {}
        self.model: nn.Module = model.module
        self.device = model.device
        self.decode_path = f"transformers ({type(model.network).__name__}) with a cache for each sequence"

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        assert inputs.query_len == 1, "a state cannot be taken back, so nothing may be proposed"
        return self._logits(inputs, torch.arange(len(inputs.ids_T)))

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        return self._logits(inputs, rows_N)

    def forget_row(self, row: int) -> None:
        """Free the cache of a sequence that has left."""
        self._states.pop(row, None)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs in the background."""

    def _logits(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] at `rows_N`, which are in the order of the step or, of prompts that are scored, are not."""
        assert inputs.rows_S is not None
        starts = inputs.query_starts.tolist()
        pieces: list[Tensor] = []
        places: list[Tensor] = []
        for i, row in enumerate(inputs.rows_S.tolist()):
            start, end = starts[i], starts[i + 1]
            wanted = ((rows_N >= start) & (rows_N < end)).nonzero().flatten()
            state = self._state(row, int(inputs.positions_T[start]))
            logits_NV = state.run(inputs.ids_T[start:end], rows_N[wanted] - start if len(wanted) else torch.tensor([0]))
            pieces.append(logits_NV[: len(wanted)])
            places.append(wanted)
        order_N = torch.cat(places).argsort()
        return torch.cat(pieces)[order_N.to(self.device)]

    def _state(self, row: int, position: int) -> SequenceState:
        """The state of a row, a new one at position 0."""
        state = self._states.get(row)
        if position == 0 or state is None:
            state = self._states[row] = SequenceState(self._model)
        assert state.length == position, "the tokens of a sequence come in order"
        return state
