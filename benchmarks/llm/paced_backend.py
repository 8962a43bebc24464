"""A backend that computes nothing: its decode steps take a fixed time and no CPU, as those of a GPU do.

For measurements of everything else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flambeau.llm import device_backends
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.sampling.grammar_masks import Bits
from flambeau.llm.sampling.row_groups import RowSettings


def use_paced_backend(step_s: float) -> None:
    """Engines on a CPU that are loaded from now on have it."""
    device_backends.BACKENDS["cpu"] = partial(PacedBackend, step_s=step_s)


@dataclass(slots=True)
class PacedTokens:
    """The tokens of a started step."""

    backend: PacedBackend
    next_ids: Tensor
    ends: float

    def choose(self, bits_SB: Bits) -> None:
        """Sampling takes no time, but it follows the masks, and the next step follows it."""
        self.ends = self.backend.ends = max(self.ends, time.monotonic())
        self.next_ids = allowed_tokens(bits_SB, int(self.next_ids[0]))

    def wait(self) -> list[int]:
        if (left := self.ends - time.monotonic()) > 0:
            time.sleep(left)
        found: list[int] = self.next_ids.tolist()
        return found


class PacedBackend(EagerBackend):
    """Decode steps run one after another. Prompts take no time. Each token follows from the one before."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        config: EngineConfig,
        name: str,
        *others: object,
        step_s: float,
    ) -> None:
        super().__init__(model, cache)
        self.async_decoder = self
        self._step_s = step_s
        self.ends = 0.0  # of the step that was started last

    def start(self, inputs: StepInputs, settings: RowSettings | None) -> PacedTokens:
        self.ends = max(self.ends, time.monotonic()) + self._step_s
        ids_S = inputs.ids_T * 31 + inputs.positions_T
        return PacedTokens(self, ids_S.remainder_(self.model.arch.vocab_size - 300).add_(300), self.ends)

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        return torch.zeros(len(rows_N), self.model.arch.vocab_size).index_fill_(1, torch.tensor([300]), 1.0)

    def decode(self, inputs: StepInputs) -> Tensor:
        """For steps that have prompts too; they take as long as the others."""
        time.sleep(self._step_s)
        return self.prefill(inputs, inputs.ids_T)


def allowed_tokens(bits_SB: Bits, first: int) -> Tensor:
    """A token [S] that each mask allows: of the words from that of token `first` on."""
    start = first // 32
    words_SB = np.roll(bits_SB, -start, axis=1)
    places_S = (words_SB != 0).argmax(1)
    words_S = words_SB[np.arange(len(words_SB)), places_S].astype(np.int64)
    lowest_S = np.log2(words_S & -words_S).astype(np.int64)
    return torch.from_numpy((places_S + start) % words_SB.shape[1] * 32 + lowest_S)
