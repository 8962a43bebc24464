"""Making an engine: the checkpoint, the tokenizer, and everything that is applied to the network, in one list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoint import load_model, read_architecture
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.errors import LLMError
from flambeau.llm.forward import EagerForward
from flambeau.llm.kv_cache import KVCache
from flambeau.llm.memory import num_blocks_for
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.tokenizer import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_engine(path: Path, config: EngineConfig | None = None, **options: Any) -> Engine:
    """An engine for a checkpoint; options are fields of EngineConfig."""
    config = replace(config or EngineConfig(), **options)
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    arch = read_architecture(path)
    dtype = dtype_for(config, arch, device)
    model = load_model(path, device=device, dtype=dtype)
    num_blocks = num_blocks_for(arch, config, device, dtype)
    cache = KVCache(arch, num_blocks, config.block_size, device=device, dtype=dtype)
    forward = EagerForward(model, cache)
    return Engine(
        arch,
        forward,
        num_blocks=num_blocks,
        config=config,
        device=str(device),
        tokenizer=load_tokenizer(Path(config.tokenizer) if config.tokenizer else path),
    )


def dtype_for(config: EngineConfig, arch: Architecture, device: torch.device) -> torch.dtype:
    """What the network computes in: as told, else float32 on a CPU and the checkpoint's own on a GPU."""
    name = config.dtype or ("float32" if device.type == "cpu" else arch.dtype)
    if name not in DTYPES:
        raise LLMError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
