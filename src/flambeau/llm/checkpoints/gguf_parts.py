"""What several architectures of GGUF files read from a header alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader

ToConfig = Callable[[GgufHeader], dict[str, Any]]
SOFTMAX, SIGMOID = 1, 2  # gating functions
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale queries by another size


def scalar(header: GgufHeader, key: str) -> Any:
    """A value that may be given for each layer, but must be the same for all that have it: 0 says that one has not."""
    value = header.get(key)
    if not isinstance(value, list):
        return value
    values = set(value) - {0} or {0}
    if len(values) != 1:
        raise CheckpointError(f"{header.path} has {key} that differs between layers, which is not supported")
    return values.pop()


def required(header: GgufHeader, key: str) -> int:
    """A number that every file of an architecture has."""
    value = header.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"{header.path} has {value!r} for {header.architecture}.{key}, which must be a number")
    return value


def listed(header: GgufHeader, key: str) -> list[int]:
    """A number for each layer."""
    given, count = header.get(key), required(header, "block_count")
    found = given if isinstance(given, list) else [given] * count
    if len(found) != count or not all(isinstance(number, int) for number in found):
        raise CheckpointError(f"{header.path} has {key} {given!r}, which must be a number for each of {count} layers")
    return found


def reject(header: GgufHeader, key: str) -> None:
    if header.get(key):
        raise CheckpointError(f"{header.path} has {key}, which is not supported for {header.architecture!r}")


def ignore(header: GgufHeader, *keys: str) -> None:
    """Name keys that say nothing new: they have one value in all files of an architecture, or follow from others."""
    for key in keys:
        header.get(key)


def has_tensor(header: GgufHeader, *parts: str) -> bool:
    """Whether the name of a tensor has one of these parts."""
    return any(part in tensor for tensor in header.tensors for part in parts)


def family(name: str, **more: Any) -> ToConfig:
    """An architecture without keys of its own."""

    def to_config(header: GgufHeader) -> dict[str, Any]:
        reject(header, "attention.sliding_window")
        return {"architectures": [name], **more}

    return to_config


def moe(name: str, **more: Any) -> ToConfig:
    return lambda header: {**family(name)(header), "num_experts": header.get("expert_count"), **more}


def window(header: GgufHeader) -> dict[str, Any]:
    """The window, and the layers that have it if the file names them."""
    pattern = header.get("attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": header.get("attention.sliding_window") or None}  # 0: there is none
    if isinstance(pattern, list):
        found["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
    elif pattern:
        found["sliding_window_pattern"] = pattern
    return found


def experts(header: GgufHeader) -> dict[str, Any]:
    """Experts as DeepSeek names their settings."""
    further = header.get("nextn_predict_layers") or 0
    given = {
        "num_experts": header.get("expert_count"),
        "n_shared_experts": header.get("expert_shared_count"),
        "routed_scaling_factor": header.get("expert_weights_scale"),
        "n_group": header.get("expert_group_count"),
        "topk_group": header.get("expert_group_used_count"),
        "first_k_dense_replace": num_dense_layers(header),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "num_hidden_layers": num_layers(header),
        "num_nextn_predict_layers": further,
    }
    return {key: value for key, value in given.items() if value is not None}


def check_gates(header: GgufHeader, supported: int) -> None:
    given = header.get("expert_gating_func")
    if given not in (None, 0, supported):
        raise CheckpointError(f"{header.path} has expert_gating_func {given}; supported is {supported}")


def num_layers(header: GgufHeader) -> int:
    """The layers of the network, without those that predict further tokens."""
    return required(header, "block_count") - (header.get("nextn_predict_layers") or 0)


def num_dense_layers(header: GgufHeader) -> int:
    """The first layers that have no experts; the number in the file may be that of another model."""
    ignore(header, "leading_dense_block_count")
    layers = range(header.get("block_count"))
    return next((i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in header.tensors), len(layers))


def query_scale(header: GgufHeader) -> dict[str, Any]:
    """The size by whose root queries are scaled: that of a head, except in the largest models."""
    is_largest = header.get("block_count") == GEMMA_27B[header.architecture]
    by_head = header.get("embedding_length") // scalar(header, "attention.head_count")
    return {"query_pre_attn_scalar": by_head if is_largest else header.get("attention.key_length", by_head)}


def latent_sizes(header: GgufHeader) -> dict[str, Any]:
    """The sizes of latent attention; older files have those of single heads under the usual names."""
    rotated = header.get("rope.dimension_count")
    key = header.get("attention.key_length_mla", header.get("attention.key_length"))
    value = header.get("attention.value_length_mla", header.get("attention.value_length"))
    if value is None:
        whole, heads = header.tensors.get("blk.0.attn_kv_b.weight"), scalar(header, "attention.head_count")
        value = whole.shape[0] // heads - (key - rotated) if whole is not None else None
    return {
        "kv_lora_rank": header.get("attention.kv_lora_rank"),
        "q_lora_rank": header.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "num_key_value_heads": None,
    }
