"""The rotary positions of a GGUF file, as config.json has them."""

from __future__ import annotations

from typing import Any

from flambeau.llm.checkpoints.gguf_tensors import read_tensor
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, RecordedHeader
from flambeau.llm.models.architecture import RopeScaling

SCALING = "rope.scaling."
SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
WITHOUT_EFFECT = ("rope.scaling.finetuned",)
NEUTRAL = {SCALING + "yarn_attn_factor": 1.0, SCALING + "yarn_ext_factor": 1.0, SCALING + "yarn_log_multiplier": 0.0}


def rope_parameters(header: GgufHeader) -> dict[str, Any]:
    """The settings of rotary positions."""
    kind = header.get("rope.scaling.type") or "none"
    if "rope_factors_long.weight" in header.tensors:  # files of Phi 3 name no type
        kind = "longrope"
    theta = {"rope_theta": header.get("rope.freq_base", 10000.0)}
    if header.get("rope.scale_linear", 1.0) != 1.0:
        raise CheckpointError(f"{header.path} has rope.scale_linear, which is not supported; convert the model again")
    factor = header.get("rope.scaling.attn_factor")
    given = {ours: header.get(SCALING + key) for key, ours in SCALING_KEYS.items()}
    if kind == "none":
        return theta
    if kind != "longrope" and factor not in (None, 1.0):
        raise CheckpointError(f"{header.path} has rope.scaling.attn_factor, which is not supported for {kind!r}")
    parameters = {"rope_type": kind, **theta, **{key: value for key, value in given.items() if value is not None}}
    if kind == "longrope":
        for name in ("long", "short"):
            parameters[f"{name}_factor"] = numbers(header, f"rope_factors_{name}.weight")
        parameters["attention_factor"] = factor
    return parameters


def check_rope_keys(header: RecordedHeader) -> None:
    """Raise for settings of positions that nothing has read: they would change the result."""
    for key, value in header.unread.items():
        if key.startswith("rope.") and key not in WITHOUT_EFFECT and value != NEUTRAL.get(key):
            raise CheckpointError(f"{header.path} has {key} {value}, which is not supported")


def numbers(header: GgufHeader, name: str) -> list[float]:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} has no {name}, which its rotary positions need")
    return [float(value) for value in read_tensor(header.path, header.tensors[name]).tolist()]


def frequency_factors(header: GgufHeader, length: int) -> RopeScaling | None:
    """Llama 3's scaling: the file has a divisor for each frequency."""
    if "rope_freqs.weight" not in header.tensors or header.architecture == "gemma4":  # which has a part of each head
        return None
    factors = tuple(numbers(header, "rope_freqs.weight"))
    return RopeScaling(
        kind="longrope",
        factor=1.0,
        original_length=length,
        attention_factor=1.0,
        short_factors=factors,
        long_factors=factors,
    )
