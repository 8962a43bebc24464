"""Engines besides the one that serves jobs: a follower rank's, and one with a caller's own draft model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import HandlerError
from flambeau.handlers.generation.background_reads import StepResult
from flambeau.handlers.generation.settings import GptSettings
from flambeau.llm.config import EngineConfig
from flambeau.llm.device_backends import eager_backend
from flambeau.llm.engine import Engine
from flambeau.llm.executor.cache_sizes import num_spare_wanted
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.loader import load_follower
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.proposers import make_draft
from flambeau.wire.messages import Request


class Follower:
    """The generation of a rank other than 0: it holds its shard and computes what rank 0 computes.

    See `flambeau.worker.generation.Generation`; the worker calls `follow` only.
    """

    places = 1
    abilities: Sequence[str] = ()
    max_length = 0
    adapters: Sequence[str] = ()
    has_work = False

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.on_results: Callable[[Sequence[StepResult]], None] | None = None
        self._follow = load_follower(path, config)

    def follow(self) -> None:
        """Return when rank 0 closes."""
        self._follow()

    def join(self, request: Request, row: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def tokenize(self, request: Request, body: bytes | bytearray) -> bytes | None:
        raise NotImplementedError

    def step(self) -> list[StepResult]:
        raise NotImplementedError

    def report(self) -> None:
        """Rank 0 reports the load."""

    def cancel(self, job_id: int) -> None:
        """Do nothing: jobs are on rank 0."""

    def close(self) -> None:
        """Do nothing: rank 0 ends `follow`."""


def check_ranks(settings: GptSettings) -> tuple[int, int]:
    """This process's rank and the number of ranks; raises HandlerError if the settings ask for another number."""
    wanted, found = settings.tensor_parallel_size or 1, int(os.environ.get("WORLD_SIZE", "1"))
    if wanted > 1 and wanted != found:
        raise HandlerError(
            f"tensor_parallel_size is {wanted}, but this worker has {found} process(es): set parallelType: tp and "
            f"parallelLevel: {wanted} (or torchrun: nproc-per-node: {wanted}) beside the handler section"
        )
    return int(os.environ.get("RANK", "0")), found


def with_draft(engine: Engine, draft: object, speculate_k: int, *, num_sequences: int) -> Engine:
    """An engine for `num_sequences` with the same network and another draft; without a draft it looks up n-grams."""
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
        lora_adapters={},
        merge_lora=False,  # it is in the weights of the network, which are the same
    )
    num_blocks = num_sequences * -(-engine.max_length // config.block_size) + 1
    device, dtype = torch.device(engine.device), next(engine.model.parameters()).dtype
    is_recurrent = engine.arch.recurrence is not None
    cache = KVCache(
        *(engine.model.arch, num_blocks, config.block_size),
        device=device,
        dtype=dtype,
        num_slots=num_sequences if is_recurrent else 0,
        num_spare=num_spare_wanted(config) if is_recurrent else 0,
    )
    return Engine(
        engine.arch,
        eager_backend(engine.model, cache),
        num_blocks=num_blocks,
        state_cache=cache.states,
        config=config,
        device=engine.device,
        tokenizer=engine.tokenizer,
        draft=make_draft(draft, num_blocks, config, device, dtype, num_sequences) if draft is not None else None,
    )
