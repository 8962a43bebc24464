"""Architecture: the shape of a decoder-only transformer, from a Hugging Face config.json or a preset's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flambeau.llm.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length a model was trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int = 8192
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from the factor
    truncate: bool = True  # yarn: whole dimensions at the ends of the ramp


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything the network's shape depends on."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_length: int = 2048
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False  # Qwen 2
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen 3: queries and keys are normalised per head
    windows: tuple[int | None, ...] = ()  # of each layer: how many tokens back it sees; empty: all of them
    num_experts: int = 0
    num_experts_per_token: int = 2
    normalises_experts: bool = True  # the weights of the chosen experts sum to one
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)  # what it was read from

    def window(self, layer: int) -> int | None:
        """How many tokens back a layer sees; None: all of them."""
        return self.windows[layer] if self.windows else None


def read_architecture(folder: Path) -> Architecture:
    """The architecture a Hugging Face folder describes."""
    path = folder / "config.json"
    try:
        return from_hugging_face(json.loads(path.read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json; name the folder of a checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def from_hugging_face(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json."""
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    eos = config.get("eos_token_id")
    return Architecture(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        intermediate_size=config["intermediate_size"],
        max_length=config.get("max_position_embeddings", 2048),
        norm_epsilon=config.get("rms_norm_eps", 1e-5),
        rope_theta=config.get("rope_theta", 10000.0),
        tied_embeddings=config.get("tie_word_embeddings", False),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_id=config.get("bos_token_id"),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        source=config,
    )
