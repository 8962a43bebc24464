"""Making an engine: the checkpoint, the tokenizer, and everything that is applied to the network, in one list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.compute.compiled import CompiledForward
from flambeau.llm.compute.forward import EagerForward, Forward
from flambeau.llm.compute.graphed import GraphedForward
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.compute.memory import num_blocks_for
from flambeau.llm.compute.parallel import LeadingForward, Ranks, Shard, connect, follow, least, local_architecture
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.applying import build, while_loading
from flambeau.llm.quantize.packing import pack
from flambeau.llm.speculation.making import Draft
from flambeau.llm.text.tokenizer import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network on its device, with its cache; or one rank's part of both."""

    arch: Architecture  # of the whole
    forward: Forward
    num_blocks: int
    draft: Draft | None = None  # on rank 0 alone, and whole


def make_engine(path: Path, config: EngineConfig | None = None, **options: Any) -> Engine:
    """An engine for a checkpoint; options are fields of EngineConfig. With several ranks, this is rank 0's."""
    config = replace(config or EngineConfig(), **options)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name the folder of a checkpoint")
    device = device_for(config)
    ranks = Ranks.join(device) if config.tensor_parallel_size > 1 else None
    tokenizer = load_tokenizer(Path(config.tokenizer) if config.tokenizer else path)  # first: it fails in no time
    network = make_network(path, config, device, ranks)
    return Engine(
        network.arch,
        LeadingForward(network.forward, ranks) if ranks else network.forward,
        num_blocks=network.num_blocks,
        config=config,
        device=str(device),
        tokenizer=tokenizer,
        draft=network.draft,
    )


def make_follower(path: Path, config: EngineConfig | None = None, **options: Any) -> Callable[[], None]:
    """Every other rank: its part is loaded now; what is returned computes what rank 0 computes, until that ends."""
    config = replace(config or EngineConfig(), **options)
    device = device_for(config)
    ranks = Ranks.join(device)
    return partial(follow, make_network(path, config, device, ranks).forward, ranks, device)


def make_network(path: Path, config: EngineConfig, device: torch.device, ranks: Ranks | None) -> Network:
    """Load a checkpoint, or a rank's part of it, and apply to it what the configuration asks for."""
    arch = read_architecture(path)
    dtype = dtype_for(config, arch, device)
    load = partial(load_model, path, device=device, dtype=dtype, arrived=while_loading(config.quantization, arch))
    if ranks is None:
        local, model = arch, load()
    else:
        local = local_architecture(arch, ranks.size)
        model = load(build=lambda _: build(local), shard=Shard(arch, ranks.rank, ranks.size))
        connect(model)
    pack(model, dtype)
    draft = load_draft(config, arch, device, dtype) if ranks is None or ranks.rank == 0 else None
    num_blocks = num_blocks_for(local, config, device, dtype, draft.arch if draft else None)
    num_blocks = num_blocks if ranks is None else least(num_blocks, ranks)
    cache = KVCache(local, num_blocks, config.block_size, device=device, dtype=dtype)
    return Network(
        arch=arch,
        # Ranks compute operation by operation: what one of them compiled alone would leave the others waiting.
        forward=forward_for(model, cache, config) if ranks is None else EagerForward(model, cache),
        num_blocks=num_blocks,
        draft=make_draft(draft, num_blocks, config, device, dtype) if draft else None,
    )


def load_draft(
    config: EngineConfig, target: Architecture, device: torch.device, dtype: torch.dtype
) -> Transformer | None:
    """The network that proposes tokens, where one is named and used."""
    if not config.draft or config.speculation == "lookup" or config.speculate_k < 1:
        return None
    path = Path(config.draft)
    vocab_size = read_architecture(path).vocab_size
    if vocab_size != target.vocab_size:
        raise LLMError(
            f"the draft {path} has {vocab_size} tokens and the model {target.vocab_size}; a draft must have the "
            "vocabulary of the model whose tokens it proposes"
        )
    draft = load_model(path, device=device, dtype=dtype)
    pack(draft, dtype)
    return draft


def make_draft(
    model: Transformer, num_blocks: int, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> Draft:
    """A draft with its cache, whose blocks are the target's."""
    cache = KVCache(model.arch, num_blocks, config.block_size, device=device, dtype=dtype)
    return Draft(forward_for(model, cache, config, "the draft"), model.arch.max_length)


def forward_for(model: Transformer, cache: KVCache, config: EngineConfig, name: str = "the model") -> Forward:
    """How steps are computed: compiled beside the first ones, unless that is not wanted."""
    if not config.compile:
        return EagerForward(model, cache)
    if cache.keys[0].device.type != "cuda":
        return CompiledForward(model, cache, name=name)
    length = min(config.max_model_len or model.arch.max_length, model.arch.max_length)
    max_blocks = -(-(length + config.speculate_k) // config.block_size)  # padding may go beyond the end
    return GraphedForward(model, cache, max_num_seqs=config.max_num_seqs, max_blocks=max_blocks, name=name)


def device_for(config: EngineConfig) -> torch.device:
    """The device that was named, else a GPU where there is one."""
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_for(config: EngineConfig, arch: Architecture, device: torch.device) -> torch.dtype:
    """What the network computes in: as told, else float32 on a CPU and the checkpoint's own on a GPU."""
    name = config.dtype or ("float32" if device.type == "cpu" else arch.dtype)
    if name not in DTYPES:
        raise LLMError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
