"""Architectures by name, as in gpt-fast: a folder gets the longest preset name that its own name contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture, RopeScaling

LLAMA_31 = RopeScaling(kind="llama3", factor=8.0, original_length=8192)
LLAMA_32 = RopeScaling(kind="llama3", factor=32.0, original_length=8192)  # the two small ones
LLAMA_3 = {"vocab_size": 128256, "num_kv_heads": 8, "rope_theta": 500000.0}
SMALL_LLAMA = {"intermediate_size": 8192, "max_length": 131072, "rope_scaling": LLAMA_32, "tied_embeddings": True}
MISTRAL = {"num_kv_heads": 8, "intermediate_size": 14336}
SHAPES: Mapping[str, tuple[int, int, int]] = {  # layers, heads, hidden size
    "1B": (16, 32, 2048),
    "3B": (28, 24, 3072),
    "7B": (32, 32, 4096),
    "8B": (32, 32, 4096),
    "13B": (40, 40, 5120),
    "30B": (60, 52, 6656),
    "34B": (48, 64, 8192),
    "70B": (80, 64, 8192),
    "405B": (126, 128, 16384),
    "stories15M": (6, 6, 288),
    "stories42M": (8, 8, 512),
    "stories110M": (12, 12, 768),
}


def llama_like(shape: str, **changes: Any) -> Architecture:
    """An architecture with Llama's proportions and some changes."""
    num_layers, num_heads, hidden_size = SHAPES[shape]
    usual = {
        "vocab_size": 32000,
        "num_kv_heads": num_heads,
        "intermediate_size": llama_intermediate_size(hidden_size),
        "dtype": "bfloat16",
    }
    return Architecture(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        head_size=hidden_size // num_heads,
        **{**usual, **changes},
    )


def llama_intermediate_size(hidden_size: int, multiple_of: int = 256, multiplier: float = 1.0) -> int:
    """Two thirds of four times the hidden size, rounded up."""
    wanted = int(multiplier * int(8 * hidden_size / 3))
    return -(-wanted // multiple_of) * multiple_of


PRESETS: Mapping[str, Architecture] = {
    "7B": llama_like("7B"),
    "13B": llama_like("13B"),
    "30B": llama_like("30B"),
    "34B": llama_like("34B", num_kv_heads=8, intermediate_size=22016, rope_theta=1e6, max_length=16384),
    "70B": llama_like("70B", num_kv_heads=8, intermediate_size=28672),
    "Llama-2-7B": llama_like("7B", max_length=4096),
    "Llama-2-13B": llama_like("13B", max_length=4096),
    "Llama-2-70B": llama_like("70B", num_kv_heads=8, intermediate_size=28672, max_length=4096),
    "CodeLlama-7b-Python-hf": llama_like("7B", rope_theta=1e6, max_length=16384),
    "CodeLlama-7B": llama_like("7B", vocab_size=32016, rope_theta=1e6, max_length=16384),
    "CodeLlama-13B": llama_like("13B", vocab_size=32016, rope_theta=1e6, max_length=16384),
    "CodeLlama-13b-Python-hf": llama_like("13B", rope_theta=1e6, max_length=16384),
    "CodeLlama-34B": llama_like("34B", num_kv_heads=8, intermediate_size=22016, rope_theta=1e6, max_length=16384),
    "Llama-3-8B": llama_like("8B", **LLAMA_3, intermediate_size=14336, max_length=8192),
    "Llama-3-70B": llama_like("70B", **LLAMA_3, intermediate_size=28672, max_length=8192),
    "Llama-3.1-8B": llama_like("8B", **LLAMA_3, intermediate_size=14336, max_length=131072, rope_scaling=LLAMA_31),
    "Llama-3.1-70B": llama_like("70B", **LLAMA_3, intermediate_size=28672, max_length=131072, rope_scaling=LLAMA_31),
    "Llama-3.1-405B": llama_like("405B", **LLAMA_3, intermediate_size=53248, max_length=131072, rope_scaling=LLAMA_31),
    "Llama-3.2-1B": llama_like("1B", **LLAMA_3, **SMALL_LLAMA),
    "Llama-3.2-3B": llama_like("3B", **LLAMA_3, **SMALL_LLAMA),
    "Mistral-7B": llama_like("7B", **MISTRAL, max_length=32768, windows=(4096,) * 32),
    "Mistral-7B-Instruct-v0.2": llama_like("7B", **MISTRAL, max_length=32768, rope_theta=1e6),
    "Mistral-7B-v0.3": llama_like("7B", **MISTRAL, vocab_size=32768, max_length=32768, rope_theta=1e6),
    "Mistral-7B-Instruct-v0.3": llama_like("7B", **MISTRAL, vocab_size=32768, max_length=32768, rope_theta=1e6),
    "Mixtral-8x7B": llama_like("7B", **MISTRAL, num_experts=8, expert_size=14336, max_length=32768, rope_theta=1e6),
    "Qwen3-30B-A3B": Architecture(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        intermediate_size=6144,
        max_length=40960,
        norm_epsilon=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        num_experts=128,
        num_experts_per_token=8,
        expert_size=768,
        dtype="bfloat16",
    ),
    "stories15M": llama_like("stories15M"),
    "stories42M": llama_like("stories42M"),
    "stories110M": llama_like("stories110M"),
}


def preset(name: str) -> Architecture:
    """The preset for a folder's name."""
    found = [known for known in PRESETS if known.lower() in name.lower()]
    if not found:
        raise CheckpointError(
            f"{name!r} has no config.json and no known name; add the checkpoint's config.json, "
            f"or call the folder by one of {', '.join(PRESETS)}"
        )
    return PRESETS[max(found, key=len)]


def from_meta(params: Mapping[str, Any], vocab_size: int) -> Architecture:
    """The architecture of Meta's params.json, which may lack the vocabulary size."""
    hidden, heads = params["dim"], params["n_heads"]
    is_scaled = bool(params.get("use_scaled_rope"))
    return Architecture(
        vocab_size=params["vocab_size"] if params.get("vocab_size", -1) > 0 else vocab_size,
        hidden_size=hidden,
        num_layers=params["n_layers"],
        num_heads=heads,
        num_kv_heads=params.get("n_kv_heads") or heads,
        head_size=hidden // heads,
        intermediate_size=llama_intermediate_size(
            hidden, params.get("multiple_of", 256), params.get("ffn_dim_multiplier") or 1.0
        ),
        max_length=131072 if is_scaled else params.get("max_seq_len", 2048),
        norm_epsilon=params.get("norm_eps", 1e-5),
        rope_theta=params.get("rope_theta", 10000.0),
        rope_scaling=(LLAMA_32 if hidden < SHAPES["8B"][2] else LLAMA_31) if is_scaled else None,
        dtype="bfloat16",
        source=params,
    )
