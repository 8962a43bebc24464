"""Compares ways to compute the same tokens when a network is loaded: what differs is not used.

Shapes: T tokens · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.backends.hugging_face.causal_model import CausalModel, SequenceState
from flambeau.llm.backends.hugging_face.paged_backend import PagedBackend
from flambeau.llm.backends.hugging_face.state_backend import StateBackend
from flambeau.llm.executor.inputs import StepInputs

LENGTH = 24  # tokens that are compared
CHUNKS = (11, 1, 2, 7, 1, 2)
WHOLE = (20, 1, 1, 1, 1)  # a prompt, then single tokens
# Of two sequences: prompts of two lengths, then both, one of them, and both again.
PAGED_TURNS = ((9, 6), (5, 8), (1, 1), (1, 1), (1, 1), (1, 1), (6, 6))
TURNS_IN_CHUNKS = ((11, 8), (7, 9), (1, 1), (1, 1), (0, 1), (1, 1), (1, 1), (1, 0), (1, 2))
TURNS = ((18, 17), (1, 1), (1, 1), (0, 1), (1, 1), (1, 1), (0, 1), (1, 1), (1, 0))
FULL_PRECISION, HALF_PRECISION = 1e-3, 0.1  # the largest difference, as a part of the logits' own spread
ROWS = 0.75  # of the rows must agree in half precision: another expert may be chosen for some


def some_ids(vocab_size: int, length: int, seed: int = 0) -> Tensor:
    """Tokens of a vocabulary that are far apart."""
    return (torch.arange(length) * 977 + 5 + 131 * seed) % min(vocab_size, 30_000)


def agrees(found_TV: Tensor, expected_TV: Tensor, dtype: torch.dtype, lengths: Sequence[int] = ()) -> bool:
    """Whether logits are the same but for rounding in this type.

    `lengths` are those of the chunks that were computed: first chunks, later ones and single tokens are compared
    separately, since different code computes them.
    """
    if found_TV.shape != expected_TV.shape:
        return False
    found_TV, expected_TV = (x - x.mean(-1, keepdim=True) for x in (found_TV.cpu(), expected_TV.cpu()))
    apart_T = (found_TV - expected_TV).norm(dim=-1) / expected_TV.norm(dim=-1).clamp(min=1e-6)
    if not apart_T.isfinite().all():
        return False
    if dtype == torch.float32:
        return float(apart_T.max()) < FULL_PRECISION
    kinds = kinds_of_rows(lengths or [len(apart_T)])
    kinds_T = torch.tensor(kinds)
    return all(float(apart_T[kinds_T == kind].quantile(ROWS)) < HALF_PRECISION for kind in {*kinds})


def all_agree(
    found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype, turns: Sequence[tuple[int, int]]
) -> bool:
    """Whether two sequences agree that were computed in these turns."""
    return all(
        agrees(one, other, dtype, lengths)
        for one, other, lengths in zip(found, expected, zip(*turns, strict=True), strict=True)
    )


def kinds_of_rows(lengths: Sequence[int]) -> list[int]:
    """For each token: 0 in the first chunk, 1 in a later one, 2 alone."""
    used = [length for length in lengths if length]
    return [0 if i == 0 else 1 if length > 1 else 2 for i, length in enumerate(used) for _ in range(length)]


def whole_logits(model: CausalModel, ids_T: Tensor) -> Tensor:
    """The logits of all tokens, computed at once by the network's own attention."""
    return SequenceState(model).run(ids_T)


def run_in_turns(model: CausalModel, sequences: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """The logits of sequences that are computed in chunks, one chunk of each in turn."""
    states = [SequenceState(model) for _ in sequences]
    found: list[list[Tensor]] = [[] for _ in sequences]
    start = 0
    for length in lengths:
        for state, ids_T, pieces in zip(states, sequences, found, strict=True):
            pieces.append(state.run(ids_T[start : start + length]))
        start += length
    return [torch.cat(pieces) for pieces in found]


def run_paged(backend: PagedBackend, sequences: Sequence[Tensor], block_size: int) -> list[Tensor]:
    """The logits of two sequences over blocks: in chunks of different lengths, then token by token."""
    found: list[list[Tensor]] = [[], []]
    starts = [0, 0]
    for lengths in PAGED_TURNS:
        inputs = two_sequences(sequences, starts, lengths, block_size)
        for pieces, logits_QV in zip(found, torch.split(backend.decode(inputs), [*lengths]), strict=True):
            pieces.append(logits_QV)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return [torch.cat(pieces) for pieces in found]


def run_states(
    backend: StateBackend, sequences: Sequence[Tensor], block_size: int, steps: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """The logits of two sequences with states: prompts, then tokens of both or of one of them."""
    found: list[list[Tensor]] = [[], []]
    starts = [0, 0]
    for lengths in steps:
        inputs = two_sequences(sequences, starts, lengths, block_size)
        if inputs.query_len == 1 and all(starts):
            logits_TV = backend.decode(inputs)
        else:
            logits_TV = backend.prefill(inputs, torch.arange(sum(lengths)))
        for pieces, logits_QV in zip(found, torch.split(logits_TV, [*lengths]), strict=True):
            pieces.append(logits_QV)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return [torch.cat(pieces) for pieces in found]


def two_sequences(
    sequences: Sequence[Tensor], starts: Sequence[int], lengths: tuple[int, int], block_size: int
) -> StepInputs:
    """The inputs of a step with so many tokens of each of two sequences, whose blocks alternate."""
    num_blocks = -(-len(sequences[0]) // block_size)
    used = [i for i, length in enumerate(lengths) if length]
    spans = [torch.arange(starts[i], starts[i] + lengths[i]) for i in used]
    tables = [torch.arange(1 + i, 1 + i + 2 * num_blocks, 2) for i in used]
    places = [
        table[span // block_size] * block_size + span % block_size for table, span in zip(tables, spans, strict=True)
    ]
    numbers = [lengths[i] for i in used]
    return StepInputs(
        torch.cat([sequences[i][span] for i, span in zip(used, spans, strict=True)]),
        torch.cat(spans),
        torch.cat(places),
        torch.tensor([0, *numbers]).cumsum(0),
        torch.tensor([starts[i] + lengths[i] for i in used]),
        torch.stack(tables),
        query_len=numbers[0] if len({*numbers}) == 1 else 0,
        rows_S=torch.tensor(used),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAbilities:
    """What a network can do with caches of its own."""

    takes_chunks: bool  # of prompts
    takes_turns: bool  # several sequences may run at a time
    is_steady: bool  # single tokens give what the same tokens give at once


def find_abilities(model: CausalModel, vocab_size: int, length: int = LENGTH) -> SequenceAbilities | None:
    """Compare the ways to compute two sequences; None: tokens depend on those after them."""
    sequences = [some_ids(vocab_size, length, seed) for seed in range(2)]
    expected_TV = whole_logits(model, sequences[0])
    half = length // 2
    if not agrees(whole_logits(model, sequences[0][:half]), expected_TV[:half], model.dtype):
        return None
    takes_chunks = agrees(run_chunks(model, sequences[:1], CHUNKS), expected_TV, model.dtype, CHUNKS)
    lengths = CHUNKS if takes_chunks else WHOLE
    alone_TV = run_in_turns(model, sequences[:1], lengths)[0]
    together_TV = run_in_turns(model, sequences, lengths)[0]
    return SequenceAbilities(
        takes_chunks=takes_chunks,
        takes_turns=agrees(together_TV, alone_TV, model.dtype, lengths),
        is_steady=agrees(alone_TV, expected_TV, model.dtype, lengths),
    )


def run_chunks(model: CausalModel, sequences: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The logits of a sequence in chunks; not numbers if the network fails."""
    try:
        return run_in_turns(model, sequences, lengths)[0]
    except (IndexError, RuntimeError, ValueError):  # some expect one token after the first call
        return torch.full((1, 1), torch.nan)
