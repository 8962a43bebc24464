"""The module of benchmarks that writes checkpoints of every kind, and small networks for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).parents[2] / "benchmarks" / "llm" / "packed_files.py"

COMMON = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {  # the border between two ranks cuts a block of 128 in the middle of 384 numbers
    "dense": {**COMMON, "hidden_size": 256, "intermediate_size": 384},
    "tied": {**COMMON, "hidden_size": 256, "intermediate_size": 384},
    "experts": {
        **COMMON,
        "hidden_size": 256,
        "head_dim": 64,
        "intermediate_size": 384,
        "moe_intermediate_size": 384,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "latent": {
        **COMMON,
        "num_key_value_heads": 4,
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "gpt-oss": {
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def load_packed_files() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packed_files", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = load_packed_files()


def write_kind(folder: Path, kind: str, network: str, **more: Any) -> Path:
    """A small checkpoint with random weights, quantized in one of the ways of `FILES.KINDS`."""
    FILES.write_checkpoint(folder, FILES.KINDS[kind], {**FILES.NETWORKS[network], **SIZES[network], **more})
    return folder
