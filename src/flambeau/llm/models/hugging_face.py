"""A Hugging Face config.json → Architecture; what the network cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture, RopeKind, RopeScaling
from flambeau.llm.models.config_values import Config, number, read_json, section, token_ids, whole
from flambeau.llm.models.families import Family, family_of

SILENT_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
FINE = {  # options that the network has only one way of doing
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "alibi": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_hugging_face(folder: Path) -> Architecture:
    """The architecture a Hugging Face folder describes; its generation_config.json may know more ends of a text."""
    arch = from_hugging_face(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    more = token_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return replace(arch, eos_ids=tuple(dict.fromkeys((*arch.eos_ids, *more))))


def from_hugging_face(config: Config) -> Architecture:
    """The architecture of a config.json."""
    family = family_of(config)
    config = {**SILENT_DEFAULTS, **family.defaults, **config}
    refuse_unsupported(config)
    heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    kv_heads = whole(config, "num_key_value_heads", heads)
    head_size = whole(config, "head_dim", hidden // heads)
    if heads % kv_heads or head_size % 2:
        raise CheckpointError(
            f"{heads} heads of size {head_size} with {kv_heads} key-value heads: the size must be even, "
            "and every key-value head serve as many heads as the others"
        )
    scaling = rope_scaling(config)
    has_bias = bool(config.get("attention_bias"))
    return Architecture(
        vocab_size=whole(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=whole(config, "intermediate_size"),
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


def refuse_unsupported(config: Config) -> None:
    """Say which option of a config.json the network cannot follow."""
    for key, values in FINE.items():
        if key in config and config[key] not in values:
            raise CheckpointError(f"{key} {config[key]!r} is not supported; supported is {values[-1]!r}")
    quantization = section(config, "quantization_config")
    if quantization and quantization.get("quant_method") != "flambeau":
        raise CheckpointError(
            f"weights quantized by {quantization.get('quant_method')!r} are not supported; "
            "use the original checkpoint and quantize it with `flambeau llm quantize`"
        )


def rope_parameters(config: Config) -> Config:
    """The keys about rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""
    parameters = section(config, "rope_parameters") or section(config, "rope_scaling")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("rope_parameters that differ between types of layers are not supported")
    return {key: value for key, value in parameters.items() if value is not None}


def rope_scaling(config: Config) -> RopeScaling | None:
    """How positions are stretched; None: they are not."""
    parameters = rope_parameters(config)
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError("partial_rotary_factor is not supported: the whole head must be rotated")
    if kind == "default":
        return None
    if kind not in get_args(RopeKind):
        raise CheckpointError(f"rope type {kind!r} is not supported; supported are default, linear, llama3 and yarn")
    trained = whole(config, "max_position_embeddings")
    original = whole(parameters, "original_max_position_embeddings", trained)
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
    """The longest sequence; Qwen names the length before YaRN stretched it."""
    named = whole(config, "max_position_embeddings")
    return max(named, int(scaling.factor * scaling.original_length)) if scaling and scaling.kind == "yarn" else named


def windows(config: Config, family: Family, length: int) -> tuple[int | None, ...]:
    """How many tokens back each layer sees; empty where all see everything."""
    is_off = family.switches_window and not config.get("use_sliding_window")
    if family.windowed == "none" or is_off or config.get("sliding_window") is None:
        return ()
    window = whole(config, "sliding_window")
    layers = windowed_layers(config, family) if window < length else frozenset()
    return tuple(window if i in layers else None for i in range(whole(config, "num_hidden_layers"))) if layers else ()


def windowed_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers that look through a window, where a model has one."""
    num_layers, named = whole(config, "num_hidden_layers"), config.get("layer_types")
    if family.windowed == "all":
        return frozenset(range(num_layers))
    if named is not None:
        if len(named) != num_layers or not set(named) <= set(LAYER_TYPES):
            raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {', '.join(LAYER_TYPES)}")
        return frozenset(i for i, kind in enumerate(named) if kind == "sliding_attention")
    if family.windowed == "unrotated":
        return unrotated_layers(config, family)
    return frozenset(range(whole(config, "max_window_layers", least=0), num_layers))


def unrotated_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers without rotary positions, of which SmolLM 3 has some."""
    if family.model_type != "smollm3":
        return frozenset()
    rotated = config.get("no_rope_layers")  # despite its name, 1 where positions are rotated
    if rotated is not None:
        return frozenset(i for i, is_rotated in enumerate(rotated) if not is_rotated)
    interval = whole(config, "no_rope_layer_interval")
    return frozenset(i for i in range(whole(config, "num_hidden_layers")) if (i + 1) % interval == 0)


def experts(config: Config) -> dict[str, Any]:
    """What is to be known about experts: Mixtral says `num_local_experts`, Qwen `num_experts`."""
    num_layers, step = whole(config, "num_hidden_layers"), whole(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if (i + 1) % step}
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    return {
        "num_experts": whole(config, key),
        "num_experts_per_token": whole(config, "num_experts_per_tok"),
        "expert_size": whole(config, "moe_intermediate_size", config.get("intermediate_size")),
        "normalizes_experts": bool(config.get("norm_topk_prob", True)),
        "dense_layers": frozenset(dense),
    }
