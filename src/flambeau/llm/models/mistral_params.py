"""Mistral's own params.json → Architecture; what is not understood is rejected by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture

KNOWN = frozenset(
    {
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "hidden_dim",
        "norm_eps",
        "vocab_size",
        "rope_theta",
        "sliding_window",
        "_sliding_window",
        "moe",
        "max_seq_len",
        "max_position_embeddings",
        "max_batch_size",
        "model_type",
        "tied_embeddings",
        "causal",
        "use_biases",
    }
)
DEFAULT_LENGTH = 32768
DEFAULT_THETA = 10000.0
EOS_ID, BOS_ID = 2, 1  # of all their tokenizers


def is_mistral(params: Mapping[str, Any]) -> bool:
    """Whether a params.json is Mistral's; Meta's has no `hidden_dim`."""
    return "hidden_dim" in params


def from_mistral(params: Mapping[str, Any]) -> Architecture:
    check(params)
    heads, hidden, layers = whole(params, "n_heads"), whole(params, "dim"), whole(params, "n_layers")
    experts = params.get("moe") or {}
    return Architecture(
        vocab_size=whole(params, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=whole(params, "n_kv_heads", heads),
        head_size=whole(params, "head_dim", hidden // heads),
        intermediate_size=whole(params, "hidden_dim"),
        max_length=whole(params, "max_position_embeddings", whole(params, "max_seq_len", DEFAULT_LENGTH)),
        norm_epsilon=float(params.get("norm_eps") or 1e-5),
        rope_theta=float(params.get("rope_theta") or DEFAULT_THETA),
        windows=windows(params, layers),
        tied_embeddings=bool(params.get("tied_embeddings")),
        num_experts=whole(experts, "num_experts") if experts else 0,
        num_experts_per_token=whole(experts, "num_experts_per_tok") if experts else 2,
        expert_size=whole(params, "hidden_dim") if experts else 0,
        eos_ids=(EOS_ID,),
        bos_id=BOS_ID,
        dtype="bfloat16",
        source=params,
    )


def check(params: Mapping[str, Any]) -> None:
    """Raise for keys that may change the result and are not understood."""
    unknown = [key for key, value in params.items() if key not in KNOWN and value not in (None, False, "", [], {})]
    unknown += [key for key, value in {"causal": True, "use_biases": False}.items() if params.get(key, value) != value]
    unknown += [f"moe.{key}" for key in params.get("moe") or {} if key not in ("num_experts", "num_experts_per_tok")]
    if unknown:
        raise CheckpointError(
            f"params.json has {', '.join(sorted(unknown))}, which is not supported; use the model in Hugging Face "
            "format (config.json and model-*.safetensors)"
        )


def windows(params: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: one for all, or a list that is repeated."""
    given = params.get("sliding_window") or params.get("_sliding_window")
    if not given:
        return ()
    pattern = given if isinstance(given, list) else [given]
    if not all(size is None or (isinstance(size, int) and size > 0) for size in pattern):
        raise CheckpointError(f"sliding_window of params.json must be whole numbers above 0, not {given!r}")
    return tuple(pattern[i % len(pattern)] for i in range(num_layers))


def whole(params: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = params.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"params.json needs {key}, a whole number from 1, not {value!r}")
    return value
