"""A backend in plain PyTorch that starts steps as a GPU does: in order, and read later."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.sampling.grammar_masks import Bits, mask_logits
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams


@dataclass
class EagerTokens:
    """Tokens that are known, but count as read only once somebody waits; those of constrained steps are chosen late."""

    logits: Tensor  # [S, V]
    states: list[SamplingState]
    tokens: Tensor | None = None
    is_read: bool = False

    def choose(self, bits: Bits) -> None:
        assert self.tokens is None
        self.sample(mask_logits(self.logits.unsqueeze(1), bits[:, None], None))

    def sample(self, logits: Tensor) -> None:
        self.tokens = Sampler(logits.shape[-1]).sample(logits, self.states).view(-1)

    @property
    def next_ids(self) -> Tensor:
        assert self.tokens is not None
        return self.tokens.clamp(min=0)

    def wait(self) -> list[int]:
        assert self.tokens is not None
        self.is_read = True
        found: list[int] = self.tokens.tolist()
        return found


class AsyncEagerBackend(EagerBackend):
    """Samples by RowSettings; notes how many steps were started before the one before was read."""

    num_started = num_ahead = 0
    last: EagerTokens | None = None

    @property
    def async_decoder(self) -> AsyncEagerBackend:
        return self

    @torch.inference_mode()
    def start(self, inputs: StepInputs, settings: RowSettings | None) -> EagerTokens:
        assert settings is not None
        self.num_started += 1
        self.num_ahead += self.last is not None and not self.last.is_read
        logits = self.decode(inputs)
        states = [state_of(settings, i, int(position)) for i, position in enumerate(inputs.positions_T)]
        self.last = EagerTokens(logits, states)
        if not settings.is_constrained:
            self.last.sample(logits.unsqueeze(1))
        return self.last


def state_of(settings: RowSettings, row: int, position: int) -> SamplingState:
    """A sequence of that length with these settings."""
    temperature, top_k, top_p, log_min_p = settings.numbers[:, row].tolist()
    params = SamplingParams(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=math.exp(log_min_p))
    state = SamplingState(params, 0, [0] * (position + 1), 1)
    state.key = int(settings.keys_S[row])
    return state
