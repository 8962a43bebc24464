"""Whether the kernels give what plain PyTorch gives for a network, in steps of every kind.

The kernels of most parts were tested with Triton's interpreter only. So the first steps of a network with such parts
are computed twice, in caches of their own, before the kernels may compute any other.

Shapes: T tokens of the step · N rows of them · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.background_compiler import Decode
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.embeddings import like_embeddings
from flambeau.llm.models.transformer import Transformer

MAX_DIFFERENCE = 0.2  # of the logits of two kernels that round to bfloat16 in every layer; an error gives about 1
MAX_WIDE_DIFFERENCE = 0.01  # in float32
LENGTHS = (70, 9)  # tokens of the prompts; more than a tile, and fewer
NUM_AFTER = 4  # tokens after them

Counts = dict[int, tuple[int, int]]  # sequence → tokens in the cache, and tokens of the step


class Network(Protocol):
    """What is compared: `CudaNetwork`."""

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of the tokens at `rows_N`."""

    def run(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of all tokens."""


class Plain(Protocol):
    """What it is compared with: `EagerBackend`."""

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of the tokens at `rows_N`."""

    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of all tokens."""


def difference(found: Tensor, expected: Tensor) -> float:
    """How far logits are off, as a share of their norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def find_difference(
    model: Transformer,
    cache: KVCache,
    build: Callable[[KVCache], Network],
    build_plain: Callable[[KVCache], Plain] | None = None,
) -> str | None:
    """What the network that `build` makes for a cache does differently from the model; None: nothing.

    `cache` is not written: its block size and type are used. `build_plain` makes what it is compared with, if that is
    not the model alone.
    """
    limit = MAX_DIFFERENCE if like_embeddings(model.model.embed_tokens).dtype.itemsize == 2 else MAX_WIDE_DIFFERENCE
    lengths = [min(length, model.arch.max_length - NUM_AFTER) for length in LENGTHS]
    has_states = cache.states.has_layers
    taken = [*steps(lengths, cache.block_size, model.arch.vocab_size, has_states=has_states)]

    def logits(build: Callable[[KVCache], Any], decode_of: Callable[[Any], Decode]) -> list[Tensor]:
        """Those of all steps, in a cache that is dropped: states of large networks take hundreds of MB."""
        own = cache_like(cache, model.arch, lengths)
        computing = build(own)
        decode, device = decode_of(computing), own.keys[0].device
        return [
            decode(inputs.to(device)) if inputs.query_len else computing.prefill(inputs, inputs.query_starts[1:] - 1)
            for _, inputs in taken
        ]

    with torch.inference_mode():
        found = logits(build, lambda network: network.run)
        expected = logits(build_plain or (lambda own: EagerBackend(model, own)), lambda plain: plain.decode)
    for (name, _), ours, theirs in zip(taken, found, expected, strict=True):
        off = difference(ours, theirs)
        if not off <= limit:  # or not a number
            return f"the logits of {name} differ by {off:.0%} of their norm"
    return None


def cache_like(cache: KVCache, arch: Architecture, lengths: list[int]) -> KVCache:
    """Room for the sequences of a comparison."""
    keys = cache.keys[0]
    num_blocks = 1 + sum(blocks_of(length, cache.block_size) for length in lengths)
    num_slots = 2 * len(lengths) if cache.states.has_layers else 0
    own = KVCache(arch, num_blocks, cache.block_size, device=keys.device, dtype=keys.dtype, num_slots=num_slots)
    for state in (state for states in own.states.layers.values() for state in states):
        state.fill_(torch.nan)  # as of sequences that have left: new ones must not read them
    return own


def steps(
    lengths: list[int], block_size: int, vocab_size: int, *, has_states: bool = False
) -> Iterator[tuple[str, StepInputs]]:
    """Prompts, then tokens after them, of one sequence, of several, and several of each.

    With states, which go from step to step, the first prompt comes in three chunks; a new sequence joins the second.
    """
    both: Counts = dict(enumerate((0, length) for length in lengths))
    kinds: list[tuple[str, Counts]] = [("prompts", both)]
    if has_states:
        first = lengths[0] - 3  # more than a chunk of the kernels
        kinds = [
            ("the first chunk of a prompt", {0: (0, first)}),
            ("prompts", {0: (first, lengths[0] - first - 1), 1: both[1]}),
            ("the last chunk of a prompt", {0: (lengths[0] - 1, 1)}),
        ]
    kinds += [
        ("several sequences", {i: (length, 1) for i, length in enumerate(lengths)}),
        ("one sequence", {0: (lengths[0] + 1, 1)}),
        ("verified tokens", {0: (lengths[0] + 2, 2), 1: (lengths[1] + 1, 2)}),
    ]
    for name, counts in kinds:
        inputs = step(counts, lengths, block_size, vocab_size, is_prompt="prompt" in name)
        if has_states:
            inputs.state_slots_S = torch.tensor([1 + i for i in counts])
        if has_states and inputs.query_len > 1:  # the state after each token goes to a slot of its own
            inputs.state_ends_T = torch.tensor([[1 + i, 1 + i + len(lengths)] for i in counts]).flatten()
        yield name, inputs


def step(counts: Counts, lengths: list[int], block_size: int, vocab_size: int, *, is_prompt: bool) -> StepInputs:
    """The inputs of a step with any tokens; sequence 0 has the blocks from 1 on, sequence 1 those after them."""
    generator = torch.Generator().manual_seed(sum(map(sum, counts.values())))
    first_blocks = [1, 1 + blocks_of(lengths[0], block_size)]
    most = max(blocks_of(length, block_size) for length in lengths)
    positions = [torch.arange(cached, cached + new) for cached, new in counts.values()]
    slots = [first_blocks[i] * block_size + places for i, places in zip(counts, positions, strict=True)]
    numbers = torch.tensor([new for _, new in counts.values()])
    return StepInputs(
        ids_T=torch.randint(vocab_size, (int(numbers.sum()),), generator=generator),
        positions_T=torch.cat(positions),
        slots_T=torch.cat(slots),
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), numbers.cumsum(0))),
        context_lens_S=torch.tensor([cached + new for cached, new in counts.values()]),
        # Those of the second sequence may be too many: a table is padded with block 0.
        block_tables_SB=torch.stack([table(first_blocks[i], blocks_of(lengths[i], block_size), most) for i in counts]),
        query_len=0 if is_prompt else int(numbers[0]),
    )


def table(first: int, number: int, width: int) -> Tensor:
    """The blocks of a sequence, and padding."""
    return torch.cat((torch.arange(first, first + number), torch.zeros(width - number, dtype=torch.int64)))


def blocks_of(length: int, block_size: int) -> int:
    """The blocks of a prompt of this length and the tokens after it."""
    return -(-(length + NUM_AFTER) // block_size)
