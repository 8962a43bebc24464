"""Random models and the inputs of their steps, for tests of what computes a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Transformer

BLOCK_SIZE = 4
BLOCKS_EACH = 8  # of every sequence: up to 32 tokens


def random_model(seed: int = 0, **changes: Any) -> Transformer:
    """A tiny model whose greedy choices are far apart."""
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "max_length": 64,
    }
    torch.manual_seed(seed)
    model = Transformer(Architecture(**{**shape, **changes})).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.15)
    return model


def room(model: Transformer, num_sequences: int, *, rubbish: float = 30.0, **options: Any) -> KVCache:
    """A cache with room for so many sequences, each with the blocks of its number; it begins with rubbish."""
    num_slots = num_sequences if model.arch.recurrence else 0
    cache = KVCache(model.arch, 1 + num_sequences * BLOCKS_EACH, BLOCK_SIZE, num_slots=num_slots, **options)
    for tensor in (*cache.keys, *cache.values, *cache.index_keys.values()):
        tensor.normal_(std=rubbish)
    for tensor in (tensor for layer in cache.states.layers.values() for tensor in layer):
        tensor.fill_(torch.nan)  # of sequences that have left
    return cache


def blocks_of(sequence: int) -> list[int]:
    """The blocks of a sequence, in an order that is not theirs in memory."""
    blocks = range(1 + sequence * BLOCKS_EACH, 1 + (sequence + 1) * BLOCKS_EACH)
    return [*reversed(blocks)]


def step_inputs(
    tokens: dict[int, tuple[int, Sequence[int]]],
    query_len: int = 0,
    device: torch.device | str = "cpu",
    *,
    has_states: bool = False,
) -> StepInputs:
    """A step of these sequences: how many tokens each has in the cache, and the ids that come next."""
    ids, positions, slots, starts, lengths = [], [], [], [0], []
    for sequence, (computed, new) in tokens.items():
        places = range(computed, computed + len(new))
        ids += new
        positions += places
        slots += [blocks_of(sequence)[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]
        starts.append(len(ids))
        lengths.append(computed + len(new))
    used = max(-(-length // BLOCK_SIZE) for length in lengths)
    with torch.device(device):
        return StepInputs(
            ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            query_starts=torch.tensor(starts),
            context_lens_S=torch.tensor(lengths),
            block_tables_SB=torch.tensor([blocks_of(sequence)[:used] for sequence in tokens]),
            query_len=query_len,
            state_slots_S=torch.tensor([1 + sequence for sequence in tokens]) if has_states else None,
        )


def prompts(num: int, vocab_size: int = 97) -> list[list[int]]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (3 + 2 * i,), generator=generator).tolist() for i in range(num)]


def greedy(backend: Backend, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What a model says after each prompt when all are computed together."""
    device, has_states = backend.device, bool(backend.model.arch.recurrence)
    inputs = step_inputs({i: (0, prompt) for i, prompt in enumerate(prompts)}, device=device, has_states=has_states)
    last = backend.prefill(inputs, inputs.query_starts[1:] - 1).argmax(-1).tolist()
    said = [[token] for token in last]
    for step in range(num_tokens - 1):
        row = {i: (len(prompt) + step, [said[i][-1]]) for i, prompt in enumerate(prompts)}
        logits = backend.decode(step_inputs(row, query_len=1, device=device, has_states=has_states))
        for tokens, token in zip(said, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
    return said


def keep_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs of steps that are compiled from now on. They run as they were traced: Inductor takes a minute."""

    def keep(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph

    def trace(step: Any, *, options: dict[str, Any], **more: Any) -> Any:
        kept = {key: value for key, value in options.items() if key == "guard_filter_fn"}
        return compiler(step, backend=keep, options=kept, **more)

    found: list[Any] = []
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", trace)
    return found
