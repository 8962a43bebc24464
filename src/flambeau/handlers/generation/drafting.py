"""An engine beside another one, for callers who bring a draft of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from flambeau.errors import HandlerError
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.loader import eager_backend, make_draft
from flambeau.llm.models.transformer import Transformer


def with_draft(engine: Engine, draft: object, speculate_k: int, *, num_sequences: int) -> Engine:
    """The same network with another draft, or with none to look up the prompt, and a cache for so many sequences."""
    if speculate_k < 1:
        raise HandlerError(f"speculate_k must be a whole number from 1, not {speculate_k!r}")
    if not isinstance(engine.model, Transformer) or not isinstance(draft, Transformer | None):
        raise HandlerError("draft_model must be a network of this server: what handler.draft_model or load_model gives")
    config: EngineConfig = replace(
        engine.config,
        max_num_seqs=num_sequences,
        prefix_cache=False,
        speculate_k=speculate_k,
        speculation="draft" if draft is not None else "lookup",
    )
    num_blocks = num_sequences * -(-engine.max_length // config.block_size) + 1
    device, dtype = torch.device(engine.device), next(engine.model.parameters()).dtype
    cache = KVCache(engine.model.arch, num_blocks, config.block_size, device=device, dtype=dtype)
    return Engine(
        engine.arch,
        eager_backend(engine.model, cache),
        num_blocks=num_blocks,
        config=config,
        device=engine.device,
        tokenizer=engine.tokenizer,
        draft=make_draft(draft, num_blocks, config, device, dtype) if draft is not None else None,
    )
