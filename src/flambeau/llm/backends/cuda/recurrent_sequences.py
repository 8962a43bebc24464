"""The sequences of a step as the kernels of recurrent layers read them, and functions of float32 numbers.

Shapes: T tokens of the step · S sequences · M chunks of their tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.executor.inputs import StepInputs

CHUNK = 32  # tokens of a delta net whose system is solved at once


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)): log(1 + z) is 2 artanh(z / (2 + z)), whose series keeps all digits of a small z."""
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    square = s * s
    series = square * (1.0 / 15.0) + (1.0 / 13.0)
    series = series * square + (1.0 / 11.0)
    series = series * square + (1.0 / 9.0)
    series = series * square + (1.0 / 7.0)
    series = series * square + 0.2
    series = series * square + (1.0 / 3.0)
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit  # type: ignore[untyped-decorator]
def span_of(sequence, starts_ptr, slots_ptr, positions_ptr, ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first token of a sequence, the end of its tokens, the slot of its state, and whether it has one.

    With ONE, each sequence has a token. Without tokens, which is padding, there is no state.
    """
    if ONE:
        start = sequence.to(tl.int64)
        end = start + 1
    else:
        start = tl.load(starts_ptr + sequence)
        end = tl.load(starts_ptr + sequence + 1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    is_old = tl.load(positions_ptr + start, mask=start < end, other=0) > 0
    return start, end, slot, is_old


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which tokens belong to which sequences, and where their states are."""

    slots_S: Tensor
    positions_T: Tensor
    starts: Tensor | None  # [S+1]; None: every sequence has one token
    of_tokens_T: Tensor | None  # the sequence of each token; None: as above
    chunks_M2: Tensor | None  # the sequence and the first token of chunks; None: as above
    ends_T: Tensor | None = None  # the slot of the state after each token; None: only that after the last, where it was

    @property
    def num_tokens(self) -> int:
        return len(self.positions_T)

    @property
    def num_sequences(self) -> int:
        return len(self.slots_S)

    @property
    def has_one_each(self) -> bool:
        return self.starts is None

    @property
    def is_prompt(self) -> bool:
        """Whether sequences may have many tokens, and only the state after the last counts."""
        return self.starts is not None and self.ends_T is None


def sequences_of(inputs: StepInputs) -> Sequences:
    """Those of a step, whose inputs are on the device. Sequences at the end may have no tokens."""
    assert inputs.state_slots_S is not None
    if inputs.query_len == 1 and inputs.state_ends_T is None:
        return Sequences(inputs.state_slots_S, inputs.positions_T, None, None, None)
    starts, num_tokens = inputs.query_starts, len(inputs.positions_T)
    tokens_T = torch.arange(num_tokens, device=starts.device)
    of_tokens_T = torch.searchsorted(starts[1:].contiguous(), tokens_T, right=True)
    of_tokens_T.clamp_max_(len(starts) - 2)  # padding behind the last sequence counts as a part of it
    chunks_M2 = chunks_of(starts, num_tokens)
    return Sequences(
        inputs.state_slots_S, inputs.positions_T, starts, of_tokens_T, chunks_M2, ends_T=inputs.state_ends_T
    )


def chunks_of(starts: Tensor, num_tokens: int) -> Tensor:
    """The sequence and the first token [M, 2] of every chunk of CHUNK tokens.

    M is what so many tokens have at most; those that are too many begin at the end of the last sequence.
    """
    num_sequences = len(starts) - 1
    counts_S = (starts.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    ends_S = counts_S.cumsum(0)
    chunks_M = torch.arange(triton.cdiv(num_tokens, CHUNK) + num_sequences, device=starts.device)
    of_chunks_M = torch.searchsorted(ends_S, chunks_M, right=True).clamp_max_(num_sequences - 1)
    firsts_M = starts[of_chunks_M] + (chunks_M - (ends_S - counts_S)[of_chunks_M]) * CHUNK
    return torch.stack((of_chunks_M, torch.minimum(firsts_M, starts[of_chunks_M + 1])), dim=1)
