"""Tiny random networks, and engines around them."""

from __future__ import annotations

import torch

from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.forward import EagerForward
from flambeau.llm.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Transformer

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


def tiny_engine(model: Transformer | None = None, *, num_blocks: int = 200, **options: object) -> Engine:
    """An engine in plain PyTorch around a tiny network, without a tokenizer."""
    model = model or tiny_model()
    config = EngineConfig(**{"block_size": 4, **options})
    cache = KVCache(model.arch, num_blocks, config.block_size)
    return Engine(model.arch, EagerForward(model, cache), num_blocks=num_blocks, config=config)
