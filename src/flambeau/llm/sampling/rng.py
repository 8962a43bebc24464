"""Counter-based random numbers: a function of key, position, token and purpose, without state.

A request with a seed therefore gets the same text whatever else is in the batch, after a preemption, and in another
process. The integers are the same on every device. A sequence's key comes from `core.sequence.seed_key`.

Shapes: N places where a token is drawn, in any number of dimensions · C tokens
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Purposes: the numbers of two purposes are independent of each other.
DRAW, ACCEPT, RESIDUAL, EXCLUDE = range(4)

_WORD = 2**64
POSITION_STEP = 0x3C6EF372FE94F82B  # odd, and far from small multiples of each other: counters do not collide
TOKEN_STEP = 0x1E3779B97F4A7C15
_PURPOSE_STEP = 0x5851F42D4C957F2D
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - _WORD  # signed words, as tensors hold them
SECOND_FACTOR = 0x94D049BB133111EB - _WORD
POSITIVE = 2**63 - 1
TO_UNIT = 2.0**-63 * (1 - 2.0**-24)  # the largest integer becomes the largest float32 below 1
SMALLEST = 2.0**-64


def uniform(keys_N: Tensor, positions_N: Tensor, tokens_C: Tensor, purpose: int) -> Tensor:
    """Numbers [N, C] above 0 and below 1, fine-grained near 0; `tokens_C` may be [C] or [N, C]."""
    return _bits(keys_N, positions_N, tokens_C, purpose).float().mul_(TO_UNIT).add_(SMALLEST)


def gumbel(keys_N: Tensor, positions_N: Tensor, tokens_C: Tensor, purpose: int) -> Tensor:
    """Gumbel noise [N, C]: the argmax of log p + noise has distribution p."""
    negative = _bits(keys_N, positions_N, tokens_C, purpose).float().mul_(-TO_UNIT).sub_(SMALLEST)
    return negative.log1p_().neg_().log_().neg_()


def _bits(keys_N: Tensor, positions_N: Tensor, tokens_C: Tensor, purpose: int) -> Tensor:
    starts_N = torch.add(keys_N, positions_N, alpha=POSITION_STEP)
    if purpose:
        starts_N = starts_N + (purpose * _PURPOSE_STEP % POSITIVE)
    words = tokens_C * TOKEN_STEP + starts_N.unsqueeze(-1)
    # Right shifts of signed words copy the sign, which costs one bit of 64 each time.
    words.bitwise_xor_(words >> 30).mul_(FIRST_FACTOR)
    words.bitwise_xor_(words >> 27).mul_(SECOND_FACTOR)
    return words.bitwise_and_(POSITIVE)


def gumbel_array(keys: NDArray[Any], positions: NDArray[Any], tokens: NDArray[Any], purpose: int) -> NDArray[Any]:
    """As `gumbel`, in numpy: the same integers; logarithms may differ in the last digit."""
    starts = keys + positions * POSITION_STEP + purpose * _PURPOSE_STEP % POSITIVE
    words = tokens * TOKEN_STEP + starts[..., None]
    words ^= words >> 30
    words *= FIRST_FACTOR
    words ^= words >> 27
    words *= SECOND_FACTOR
    words &= POSITIVE
    numbers: NDArray[Any] = words.astype(np.float32)
    numbers *= np.float32(-TO_UNIT)
    numbers -= np.float32(SMALLEST)
    np.log1p(numbers, out=numbers)
    np.negative(numbers, out=numbers)
    np.log(numbers, out=numbers)
    np.negative(numbers, out=numbers)
    return numbers
