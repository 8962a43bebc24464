"""Architecture: the shape of a decoder-only transformer.

It comes from a Hugging Face config.json (hugging_face.py) or from a preset (presets.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are scaled beyond the length that a model was trained on."""

    kind: RopeKind
    factor: float
    original_length: int = 8192
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed from the factor
    mscale: float | None = None  # yarn
    mscale_all_dimensions: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything that the network's shape depends on.

    With tensor parallelism, each rank has the architecture of its part: fewer heads, a smaller intermediate size.
    """

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
    unrotated_layers: frozenset[int] = frozenset()  # SmolLM 3: layers without rotary positions
    tied_embeddings: bool = False
    qkv_bias: bool = False  # Qwen 2
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen 3: queries and keys are normalized per head
    windows: tuple[int | None, ...] = ()  # attention window of each layer in tokens; empty: no window
    num_experts: int = 0
    num_experts_per_token: int = 2
    expert_size: int = 0  # the intermediate size of one expert
    normalizes_experts: bool = True  # the weights of the chosen experts sum to one
    dense_layers: frozenset[int] = frozenset()  # layers without experts in a network that has them
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)  # config.json or params.json

    def window(self, layer: int) -> int | None:
        """The attention window of a layer in tokens; None: no window."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers
