"""Loads an engine: reads the checkpoint and tokenizer; network_loader loads the network, or transformers does."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from flambeau.llm.backends.hugging_face.backend_choice import check_settings, load_pretrained
from flambeau.llm.backends.hugging_face.pretrained import read_limits
from flambeau.llm.checkpoints.checkpoint import read_architecture, unsupported_reason
from flambeau.llm.checkpoints.weight_files import weight_paths
from flambeau.llm.config import EngineConfig, ModelImpl
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.executor.kv_cache import block_bytes
from flambeau.llm.executor.leader import LeaderAdapters, LeaderBackend, LeaderStates, follow
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.images.pretrained_processor import PretrainedProcessor
from flambeau.llm.kv_store.block_store import BlockStore
from flambeau.llm.kv_store.rank_store import StoreFollower
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.vision_architecture import PretrainedVision
from flambeau.llm.named_adapters import Adapters
from flambeau.llm.network_loader import LoadedNetwork, dtype_for, load_network
from flambeau.llm.proposers import head_words, load_draft, make_draft, wants_head
from flambeau.llm.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MIN_VOCABULARY = 0.9  # of the network's ids


def load_engine(path: Path, config: EngineConfig | None = None, **options: Any) -> Engine:
    """The engine of a checkpoint; options are fields of EngineConfig. With several ranks, this runs on rank 0."""
    config = replace(config or EngineConfig(), **options)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name the folder of a checkpoint")
    device = device_for(config)
    reason = reason_for_transformers(path, config)
    if reason is not None:
        check_settings(config)
    ranks = TensorParallelGroup.join(device) if config.tensor_parallel_size > 1 else None
    tokenizer = load_tokenizer(Path(config.tokenizer) if config.tokenizer else path)  # first: it fails quickly
    if reason is None:
        check_vocabulary(tokenizer, read_architecture(path), config.tokenizer)
        loaded = load_network(path, config, device, ranks)
        # As processors of transformers do, and its tokenizers do not.
        tokenizer.begins_chats = isinstance(loaded.arch.vision, PretrainedVision) or loaded.arch.sounds is not None
        if loaded.images is not None and isinstance(loaded.images.processor, PretrainedProcessor):
            tokenizer.before_chats = loaded.images.processor.system_prompt
    else:
        loaded = load_transformers(path, config, device, reason)
        check_vocabulary(tokenizer, loaded.arch, config.tokenizer)
    leader = LeaderBackend(loaded.backend, ranks) if ranks else None
    adapters: Adapters | None = loaded.adapters
    states = loaded.state_cache
    if leader is not None and ranks is not None and loaded.adapters is not None:
        adapters = LeaderAdapters(loaded.adapters, ranks, leader)
    if leader is not None and ranks is not None and states is not None:
        states = LeaderStates(states, ranks, leader)
    return Engine(
        loaded.arch,
        leader or loaded.backend,
        num_blocks=loaded.num_blocks,
        state_cache=states,
        config=loaded.config,
        device=str(device),
        tokenizer=tokenizer,
        draft=loaded.draft,
        adapters=adapters,
        images=loaded.images,
        sounds=loaded.sounds,
        whole_prompts=loaded.whole_prompts,
        store=loaded.store if isinstance(loaded.store, BlockStore) else None,
    )


def reason_for_transformers(path: Path, config: EngineConfig) -> str | None:
    """Why a checkpoint runs through transformers; None: it does not."""
    if config.model_impl not in get_args(ModelImpl):
        raise LLMError(f"model_impl must be one of {', '.join(get_args(ModelImpl))}, not {config.model_impl!r}")
    if config.model_impl == "transformers":
        if not (path / "config.json").is_file():
            raise CheckpointError(f"model_impl: transformers needs a folder with a config.json, which {path} is not")
        return "model_impl: transformers"
    return unsupported_reason(path) if config.model_impl == "auto" else None


def load_transformers(path: Path, config: EngineConfig, device: torch.device, reason: str) -> LoadedNetwork:
    """Load a network of transformers, for checkpoints that the engine's own network does not know."""
    if importlib.util.find_spec("transformers") is not None:
        unknown = reason.partition(";")[0]
        logger.info("%s; transformers, which may have it, is imported, and that takes some seconds", unknown)
    with named_reason(reason):
        weight_paths(path)  # before anything slow
        limits = read_limits(path, trusts_code=config.trust_remote_code)
    if wants_head(config):
        raise LLMError(
            f"{head_words(config)} reads hidden states of the engine's own network, and this model runs through "
            "transformers; use a draft model, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    dtype = dtype_for(config, limits, device)
    draft = load_draft(config, limits, device, dtype)
    if draft is not None and draft.arch.recurrence is not None:
        raise LLMError(
            f"the draft {config.draft} has recurrent layers, and this model runs through transformers; use a draft "
            "without, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    draft_bytes = block_bytes(draft.arch, config.block_size, dtype) if draft else 0
    with named_reason(reason):
        loaded = load_pretrained(
            path, limits, config, device=device, dtype=dtype, reason=reason, draft_block_bytes=draft_bytes
        )
    drafts = draft is not None and bool(loaded.config.draft)
    return LoadedNetwork(
        arch=loaded.arch,
        backend=loaded.backend,
        num_blocks=loaded.num_blocks,
        draft=make_draft(draft, loaded.num_blocks, config, device, dtype) if draft and drafts else None,
        config=loaded.config,
        whole_prompts=loaded.whole_prompts,
    )


@contextmanager
def named_reason(reason: str) -> Iterator[None]:
    """Say why the engine's own network was not used, where that of transformers cannot be loaded either."""
    try:
        yield
    except CheckpointError as error:
        first = reason.partition(";")[0]
        # An error that begins with the same name says it all.
        text = str(error) if str(error).split(" ", 1)[0] == first.split(" ", 1)[0] else f"{first}; {error}"
        raise CheckpointError(text) from error


def check_vocabulary(tokenizer: Tokenizer, arch: Architecture, named: str) -> None:
    """Reject the tokenizer of another model, whose ids would mean other text; `named` is the tokenizer's own path.

    A network may have more ids than its tokenizer: vocabularies are padded, usually by less than a tenth.
    """
    if tokenizer.num_base_tokens > arch.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.num_base_tokens} tokens and the model {arch.vocab_size}: it is the "
            "tokenizer of another model; use the files that came with the checkpoint"
        )
    if named and tokenizer.vocab_size < arch.vocab_size * MIN_VOCABULARY:
        raise CheckpointError(
            f"the tokenizer {named} has {tokenizer.vocab_size} tokens and the model {arch.vocab_size}: it is the "
            "tokenizer of another model; use the files that came with the checkpoint"
        )


def load_follower(path: Path, config: EngineConfig | None = None, **options: Any) -> Callable[[], None]:
    """Load the part of a rank other than 0; the result computes what rank 0 computes until that ends."""
    config = replace(config or EngineConfig(), **options)
    device = device_for(config)
    ranks = TensorParallelGroup.join(device)
    with errors_only(logging.getLogger("flambeau.llm.checkpoints")):  # rank 0 reads the same files, and warns of them
        loaded = load_network(path, config, device, ranks)
    assert loaded.adapters is not None
    following = partial(follow, loaded.backend, ranks, device, loaded.adapters, states=loaded.state_cache)
    if not isinstance(loaded.store, StoreFollower):
        return following
    loaded.store.start()
    return partial(following, loaded.store.join)


@contextmanager
def errors_only(source: logging.Logger) -> Iterator[None]:
    """Leave out what this logger and those below it have to say but errors."""
    level = source.level
    source.setLevel(logging.ERROR)
    try:
        yield
    finally:
        source.setLevel(level)


def device_for(config: EngineConfig) -> torch.device:
    """The configured device, else a GPU if there is one."""
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
