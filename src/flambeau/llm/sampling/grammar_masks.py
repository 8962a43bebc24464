"""Masks of constrained sequences: made in a thread beside the forward pass, applied to logits before sampling.

The mask of a token needs the token before it. It is made once that token is known, while the network computes.

Shapes: S sequences · W places of each · V vocabulary · P constrained sequences · B words of 32 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.core.sequence import SamplingState

Bits = NDArray[np.int32]
Ahead = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class MadeMasks:
    """The masks of one sequence [W, B], and the tokens that they come after."""

    num_tokens: int
    ahead: Sequence[int]
    bits: Bits


class GrammarMasks:
    """Makes masks, one step at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._made: Future[dict[SamplingState, MadeMasks]] | None = None

    def prepare(self, states: Sequence[SamplingState], ahead: Ahead | None) -> None:
        """Start making the masks after these sequences' tokens, and after each of the tokens ahead."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._wait()
        self._made = self._thread.submit(make_masks, states, ahead)

    def of(self, states: Sequence[SamplingState], ahead: Ahead | None, offset: int, num_places: int) -> Bits:
        """The masks [P, W, B] of places after the first `offset` of the tokens ahead."""
        made = self._wait()
        found = []
        for i, state in enumerate(states):
            some, ready = [] if ahead is None else ahead[i], made.get(state)
            if ready is not None and (ready.num_tokens, ready.ahead, offset) == (len(state.tokens), some, 0):
                found.append(ready.bits)
            else:  # a draft makes its proposal token by token
                found.append(masks_of(state, some, offset, num_places))
        return np.stack(found)

    def _wait(self) -> dict[SamplingState, MadeMasks]:
        """What was made beside the step. The matchers are free to use afterwards."""
        return self._made.result() if self._made is not None else {}


def make_masks(states: Sequence[SamplingState], ahead: Ahead | None) -> dict[SamplingState, MadeMasks]:
    tokens: Ahead = [[] for _ in states] if ahead is None else ahead
    return {
        state: MadeMasks(len(state.tokens), some, masks_of(state, some, 0, len(some) + 1))
        for state, some in zip(states, tokens, strict=True)
    }


def masks_of(state: SamplingState, ahead: Sequence[int], offset: int, num_places: int) -> Bits:
    assert state.grammar is not None
    bits: Bits = state.grammar.masks(state.tokens[state.num_prompt :], ahead, offset, num_places)
    return bits


def mask_logits(logits_SWV: Tensor, bits_PWB: Bits, rows_P: Tensor | None) -> Tensor:
    """The logits with -inf for tokens that are not allowed; `rows_P` None: in every row. The given ones stay."""
    is_allowed = expand_bits(bits_PWB, logits_SWV.shape[-1], logits_SWV.device)
    if rows_P is None:
        return torch.where(is_allowed, logits_SWV, -torch.inf)
    return logits_SWV.index_copy(0, rows_P, torch.where(is_allowed, logits_SWV[rows_P], -torch.inf))


def expand_bits(bits_PWB: Bits, vocab_size: int, device: torch.device) -> Tensor:
    """Whether each token is allowed [P, W, V]. The words travel to the device, which expands them."""
    if device.type == "cpu":
        flags: NDArray[Any] = np.unpackbits(bits_PWB.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    words = torch.from_numpy(bits_PWB)
    words = (words.pin_memory() if device.type == "cuda" else words).to(device, non_blocking=True)
    places = torch.arange(32, device=device, dtype=torch.int32)
    return (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(-2)[..., :vocab_size].bool()
