"""Masks of constrained sequences: made in a thread beside the forward pass, applied to logits before sampling.

The mask of a token needs the token before it. It is made once that token is known, while the network computes.

Shapes: S sequences · W places of each · V vocabulary · P constrained sequences · B words of 32 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.core.sequence import SamplingState

Bits = NDArray[np.int32]
# What the eight tokens of a byte of a mask get [256, 8].
BYTE_LOGITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)
Ahead = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class MadeMasks:
    """The masks of some sequences [P, W, B], and the tokens that they come after."""

    states: Sequence[SamplingState]
    lengths: list[int]
    ahead: Ahead | None
    bits_PWB: Bits

    def fit(self, states: Sequence[SamplingState], ahead: Ahead | None) -> bool:
        return (self.states, self.lengths, self.ahead) == (states, lengths_of(states), ahead)


class GrammarMasks:
    """Makes masks, one step at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._thread: ThreadPoolExecutor | None = None
        self._made: Future[MadeMasks] | None = None

    def prepare(self, states: Sequence[SamplingState], ahead: Ahead | None) -> None:
        """Start making the masks after these sequences' tokens, and after each of the tokens ahead."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._wait()
        self._made = self._thread.submit(make_masks, states, ahead, self._num_words)

    def of(self, states: Sequence[SamplingState], ahead: Ahead | None, offset: int, num_places: int) -> Bits:
        """The masks [P, W, B] of places after the first `offset` of the tokens ahead."""
        made = self._wait()
        if made is not None and offset == 0 and made.fit(states, ahead):
            return made.bits_PWB
        if (ahead, offset, num_places) == (None, 0, 1):
            return make_masks(states, None, self._num_words).bits_PWB
        # A draft makes its proposal token by token.
        some = [()] * len(states) if ahead is None else ahead
        return np.stack([masks_of(*each, offset, num_places) for each in zip(states, some, strict=True)])

    def next_of(self, states: Sequence[SamplingState | None]) -> Bits:
        """The masks [S, B] of the next token of each sequence; without a grammar, and for None, all are allowed."""
        constrained = [(i, state) for i, state in enumerate(states) if state is not None and state.grammar is not None]
        bits_PB = self.of([state for _, state in constrained], None, 0, 1)[:, 0]
        if len(constrained) == len(states):
            return bits_PB
        bits_SB = np.full((len(states), self._num_words), -1, np.int32)
        bits_SB[[i for i, _ in constrained]] = bits_PB
        return bits_SB

    def _wait(self) -> MadeMasks | None:
        """What was made beside the step. The matchers are free to use afterwards.

        On a busy machine the thread may not have begun; then the caller makes the masks sooner by itself.
        """
        return None if self._made is None or self._made.cancel() else self._made.result()


def lengths_of(states: Sequence[SamplingState]) -> list[int]:
    return [len(state.tokens) for state in states]


def make_masks(states: Sequence[SamplingState], ahead: Ahead | None, num_words: int) -> MadeMasks:
    """The masks after the tokens of each sequence and after each of those ahead, of which all have the same number."""
    if ahead is not None:
        masks = [masks_of(state, some, 0, len(some) + 1) for state, some in zip(states, ahead, strict=True)]
        return MadeMasks(states, lengths_of(states), ahead, np.stack(masks))
    bits_PWB = np.empty((len(states), 1, num_words), np.int32)
    for state, bits_WB in zip(states, bits_PWB, strict=True):
        assert state.grammar is not None
        state.grammar.fill(state.tokens, state.num_prompt, bits_WB[0])
    return MadeMasks(states, lengths_of(states), None, bits_PWB)


def masks_of(state: SamplingState, ahead: Sequence[int], offset: int, num_places: int) -> Bits:
    assert state.grammar is not None
    bits: Bits = state.grammar.masks(state.tokens[state.num_prompt :], ahead, offset, num_places)
    return bits


def mask_logits(logits_SWV: Tensor, bits_PWB: Bits, rows_P: Tensor | None) -> Tensor:
    """The logits with -inf for tokens that are not allowed; `rows_P` None: in every row. The given ones stay."""
    if rows_P is None:
        return masked(logits_SWV, bits_PWB)
    return logits_SWV.index_copy(0, rows_P, masked(logits_SWV[rows_P], bits_PWB))


def masked(logits_PWV: Tensor, bits_PWB: Bits) -> Tensor:
    """A copy with -inf for tokens that are not allowed; NaN stays, so that a broken network is noticed."""
    if logits_PWV.device.type != "cpu" or logits_PWV.dtype != torch.float32:
        is_allowed = expand_bits(bits_PWB, logits_PWV.shape[-1], logits_PWV.device)
        return torch.where(is_allowed, logits_PWV, logits_PWV - torch.inf)
    # 0 or -inf for each token, which is added: many times as fast as a choice for each.
    copy: NDArray[np.float32] = BYTE_LOGITS.take(bits_PWB.view(np.uint8), axis=0)
    copy = copy.reshape(*bits_PWB.shape[:2], -1)[..., : logits_PWV.shape[-1]]
    copy += logits_PWV.numpy()
    return torch.from_numpy(copy)


def best_allowed(logits_SWV: Tensor, bits_PWB: Bits, rows: Sequence[int]) -> Tensor:
    """The token [S, W] with the largest logit of those that are allowed in these rows; NO_TOKEN if it is not finite.

    On a CPU. The token with the largest logit of all is mostly allowed; else only words with allowed tokens are read.
    """
    logits: NDArray[np.float32] = logits_SWV.numpy()
    best: NDArray[np.int64] = logits.argmax(-1)
    for row, bits_WB in zip(rows, bits_PWB, strict=True):
        for place, bits_B in enumerate(bits_WB):
            token = int(best[row, place])
            is_allowed = (bits_B[token // 32] >> (token % 32)) & 1
            if not is_allowed and not np.isnan(logits[row, place, token]):
                best[row, place] = best_of_words(logits[row, place], bits_B)
    values = np.take_along_axis(logits, np.maximum(best, 0)[..., None], -1)[..., 0]
    return torch.from_numpy(np.where(np.isfinite(values), best, NO_TOKEN))


def best_of_words(logits_V: NDArray[np.float32], bits_B: Bits) -> int:
    words = np.flatnonzero(bits_B)
    if len(words) > len(bits_B) // 4:
        masked_V: NDArray[np.float32] = BYTE_LOGITS.take(bits_B.view(np.uint8), axis=0).reshape(-1)[: len(logits_V)]
        masked_V += logits_V
        return int(masked_V.argmax())
    flags = np.unpackbits(bits_B[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    places, tokens = np.nonzero(flags)
    tokens += 32 * words[places]
    tokens = tokens[tokens < len(logits_V)]
    return int(tokens[logits_V[tokens].argmax()]) if len(tokens) else NO_TOKEN


def expand_bits(bits_PWB: Bits, vocab_size: int, device: torch.device) -> Tensor:
    """Whether each token is allowed [P, W, V]. The words travel to the device, which expands them."""
    words = torch.from_numpy(bits_PWB)
    words = (words.pin_memory() if device.type == "cuda" else words).to(device, non_blocking=True)
    places = torch.arange(32, device=device, dtype=torch.int32)
    return (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(-2)[..., :vocab_size].bool()
