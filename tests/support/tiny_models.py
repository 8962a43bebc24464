"""Tiny random networks, and engines around them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from flambeau.llm.backends.eager import EagerBackend, PagedAttention
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.executor.cache_sizes import num_spare_wanted, ring_length
from flambeau.llm.executor.draft import DraftModel, StateRings
from flambeau.llm.executor.head import HeadModel
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.kv_store.block_store import open_store
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.text.tokenizer import Tokenizer

ARCH = Architecture(
    vocab_size=97,
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=12,
    intermediate_size=80,
    max_length=256,
)


def tiny_model(arch: Architecture = ARCH, seed: int = 0) -> Transformer:
    """A network with random weights, wide enough apart that greedy choices are no matter of rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(arch).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.15)
    return model


def tiny_hybrid(kind: str, **changes: Any) -> Transformer:
    """A network with recurrent layers of a kind around one with attention; `joint`: they have attention, too."""
    name = "mamba2" if kind == "joint" else kind
    shape: dict[str, Any] = {
        "mamba": {"inner_size": 64, "state_size": 6, "time_step_rank": 3},
        "mamba2": {"inner_size": 64, "num_heads": 8, "head_size": 8, "state_size": 10, "num_groups": 2},
        "short_conv": {"inner_size": 64, "conv_width": 3},
        "delta_net": {"inner_size": 64, "num_heads": 4, "head_size": 16, "state_size": 8, "num_groups": 2},
        "kimi_delta": {"inner_size": 64, "num_heads": 4, "head_size": 16, "state_size": 16, "num_groups": 4}
        | {"gate_rank": 8, "conv_bias": False},
        "lightning": {"inner_size": 64, "num_heads": 4, "head_size": 16, "state_size": 16, "num_groups": 4}
        | {"slope_factors": (1.0, 0.6, 0.3), "query_scale": 0.25},
    }[name]
    recurrence = Recurrence(
        **{"kind": name, "is_beside_attention": kind == "joint", "layers": frozenset({0, 2}), **shape, **changes}
    )
    return tiny_model(replace(ARCH, head_size=16, recurrence=recurrence))


def tiny_draft(model: Transformer, *, change: float = 0.02, seed: int = 1) -> Transformer:
    """A network that mostly agrees with another: its weights, changed a little."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter += change * torch.randn(parameter.shape, generator=generator)
    return draft


def tiny_engine(
    model: Transformer | None = None,
    *,
    num_blocks: int = 200,
    draft: Transformer | None = None,
    head: DraftHead | None = None,
    tokenizer: Tokenizer | None = None,
    spare: int | None = None,
    rings: int | None = None,
    kind: type[EagerBackend] = EagerBackend,
    **options: object,
) -> Engine:
    """An engine in plain PyTorch around a tiny network."""
    model = model or tiny_model()
    config = EngineConfig(**{"block_size": 4, **options})
    cache = KVCache(model.arch, num_blocks, config.block_size)
    if model.arch.recurrence:
        wanted = config if draft is None and head is None else replace(config, draft="given")
        num_spare = num_spare_wanted(wanted) if spare is None else spare
        cache.states = StateCache(model.arch, config.max_num_seqs, num_spare)
    for state in (state for layer in cache.states.layers.values() for state in layer):
        state.fill_(torch.nan)  # nobody may look at the state of a sequence that has left
    proposing: DraftModel | HeadModel | None = None
    if head is not None:
        cache.of_head = KVCache(head.arch, num_blocks, config.block_size)
        proposing = HeadModel(head, cache.of_head, HiddenStates(head.settings.layers), PagedAttention)
    elif draft is not None:
        length = ring_length(config)
        num_slots = (config.max_num_seqs if rings is None else rings) * length if draft.arch.recurrence else 0
        draft_cache = KVCache(draft.arch, num_blocks, config.block_size, num_slots=num_slots)
        for state in (state for layer in draft_cache.states.layers.values() for state in layer):
            state.fill_(torch.nan)
        states = StateRings(draft_cache.states, length) if num_slots else None
        backend = kind(draft, draft_cache) if num_slots else EagerBackend(draft, draft_cache)
        proposing = DraftModel(backend, draft.arch.max_length, states)
    backend = kind(model, cache, states=proposing.states) if isinstance(proposing, HeadModel) else kind(model, cache)
    return Engine(
        model.arch,
        backend,
        num_blocks=num_blocks,
        state_cache=cache.states,
        config=config,
        draft=proposing,
        tokenizer=tokenizer,
        store=None if model.arch.recurrence else open_store(config, cache, model, repr(model.arch)),
    )
