"""Hugging Face config.json → Architecture; unsupported options are rejected by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from flambeau.llm.errors import CheckpointError
from flambeau.llm.json_files import read_object
from flambeau.llm.models.architecture import Architecture, RopeKind, RopeScaling
from flambeau.llm.models.families import Config, Family, family_of

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
SUPPORTED = {  # options with only one supported value
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "alibi": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_hugging_face(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder; generation_config.json may add end tokens."""
    arch = from_hugging_face(read_object(folder / "config.json", CheckpointError))
    generation = folder / "generation_config.json"
    more = token_ids(read_object(generation, CheckpointError).get("eos_token_id")) if generation.is_file() else ()
    return replace(arch, eos_ids=tuple(dict.fromkeys((*arch.eos_ids, *more))))


def from_hugging_face(config: Config) -> Architecture:
    family = family_of(config)
    config = {**DEFAULTS, **family.defaults, **config}
    check_supported(config)
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    kv_heads = integer(config, "num_key_value_heads", heads)
    head_size = integer(config, "head_dim", hidden // heads)
    if heads % kv_heads or head_size % 2:
        raise CheckpointError(
            f"{heads} heads of size {head_size} with {kv_heads} key-value heads: the size must be even, "
            "and every key-value head serve as many heads as the others"
        )
    scaling = rope_scaling(config)
    has_bias = bool(config.get("attention_bias"))
    return Architecture(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=integer(config, "intermediate_size"),
        max_length=max_length(config, scaling),
        norm_epsilon=number(config, "rms_norm_eps"),
        rope_theta=number({**config, **rope_parameters(config)}, "rope_theta", 10000.0),
        rope_scaling=scaling,
        unrotated_layers=unrotated_layers(config, family),
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=has_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        windows=windows(config, family, max_length(config, scaling)),
        eos_ids=token_ids(config.get("eos_token_id")),
        bos_id=config.get("bos_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        source=config,
        **(experts(config) if family.experts else {}),
    )


def check_supported(config: Config) -> None:
    """Raise for the first option that the network does not support."""
    for key, values in SUPPORTED.items():
        if key in config and config[key] not in values:
            raise CheckpointError(f"{key} {config[key]!r} is not supported; supported is {values[-1]!r}")
    quantization = section(config, "quantization_config")
    if quantization and quantization.get("quant_method") != "flambeau":
        raise CheckpointError(
            f"weights quantized by {quantization.get('quant_method')!r} are not supported; "
            "use the original checkpoint and quantize it with `flambeau llm quantize`"
        )


def rope_parameters(config: Config) -> Config:
    """The settings of rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""
    parameters = section(config, "rope_parameters") or section(config, "rope_scaling")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("rope_parameters that differ between types of layers are not supported")
    return {key: value for key, value in parameters.items() if value is not None}


def rope_scaling(config: Config) -> RopeScaling | None:
    """How positions are scaled; None: not at all."""
    parameters = rope_parameters(config)
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError("partial_rotary_factor is not supported: the whole head must be rotated")
    if kind == "default":
        return None
    if kind not in get_args(RopeKind):
        raise CheckpointError(f"rope type {kind!r} is not supported; supported are default, linear, llama3 and yarn")
    trained = integer(config, "max_position_embeddings")
    original = integer(parameters, "original_max_position_embeddings", trained)
    return RopeScaling(
        kind=kind,
        factor=number(parameters, "factor", trained / original if kind == "yarn" else None),
        original_length=original,
        low_frequency_factor=number(parameters, "low_freq_factor", 1.0),
        high_frequency_factor=number(parameters, "high_freq_factor", 4.0),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dimensions=parameters.get("mscale_all_dim"),
        truncate=parameters.get("truncate", True),
    )


def max_length(config: Config, scaling: RopeScaling | None) -> int:
    """The longest sequence; Qwen's config.json has the length before YaRN scaling."""
    named = integer(config, "max_position_embeddings")
    return max(named, int(scaling.factor * scaling.original_length)) if scaling and scaling.kind == "yarn" else named


def windows(config: Config, family: Family, length: int) -> tuple[int | None, ...]:
    """The attention window of each layer; empty if no layer has one."""
    is_off = family.switches_window and not config.get("use_sliding_window")
    if family.windowed == "none" or is_off or config.get("sliding_window") is None:
        return ()
    window = integer(config, "sliding_window")
    layers = windowed_layers(config, family) if window < length else frozenset()
    return tuple(window if i in layers else None for i in range(integer(config, "num_hidden_layers"))) if layers else ()


def windowed_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers with a window, in a model that has one."""
    num_layers, named = integer(config, "num_hidden_layers"), config.get("layer_types")
    if family.windowed == "all":
        return frozenset(range(num_layers))
    if named is not None:
        if len(named) != num_layers or not set(named) <= set(LAYER_TYPES):
            raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {', '.join(LAYER_TYPES)}")
        return frozenset(i for i, kind in enumerate(named) if kind == "sliding_attention")
    if family.windowed == "unrotated":
        return unrotated_layers(config, family)
    return frozenset(range(integer(config, "max_window_layers", least=0), num_layers))


def unrotated_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers without rotary positions (SmolLM 3)."""
    if family.model_type != "smollm3":
        return frozenset()
    rotated = config.get("no_rope_layers")  # despite its name, 1 for layers with rotary positions
    if rotated is not None:
        return frozenset(i for i, is_rotated in enumerate(rotated) if not is_rotated)
    interval = integer(config, "no_rope_layer_interval")
    return frozenset(i for i in range(integer(config, "num_hidden_layers")) if (i + 1) % interval == 0)


def experts(config: Config) -> dict[str, Any]:
    """The settings of experts; Mixtral has `num_local_experts`, Qwen `num_experts`."""
    num_layers, step = integer(config, "num_hidden_layers"), integer(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if (i + 1) % step}
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    return {
        "num_experts": integer(config, key),
        "num_experts_per_token": integer(config, "num_experts_per_tok"),
        "expert_size": integer(config, "moe_intermediate_size", config.get("intermediate_size")),
        "normalizes_experts": bool(config.get("norm_topk_prob", True)),
        "dense_layers": frozenset(dense),
    }


def section(config: Config, key: str) -> Config:
    """The object under a key; empty if there is none."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json has {value!r} for {key}, which must be an object")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """One token id, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of at least `least`, required unless there is a default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json needs {key}, a whole number from {least}, not {value!r}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number above 0, required unless there is a default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json needs {key}, a number above 0, not {value!r}")
    return float(value)
