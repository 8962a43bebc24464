"""Hugging Face config.json → Architecture; unsupported options are rejected by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.json_files import read_object
from flambeau.llm.models.architecture import Activation, Architecture, RopeKind, RopeScaling
from flambeau.llm.models.config_keys import DUAL_CHUNKS, HARMLESS, WINDOW_KEYS, RecordedConfig, unknown_keys
from flambeau.llm.models.families.config_parts import TEXT_NAMES, partial_rotation
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.table import family_of
from flambeau.llm.models.grid_vision_config import grid_decoder_config, read_grid_vision
from flambeau.llm.models.vision_config import decoder_config, read_pretrained_vision, read_vision

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "xielu": "xielu",
}
SUPPORTED = {  # options with only one supported value
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_parallel_residual": (None, False),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "alibi": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "rope_interleaved": (None, False),
    "lm_head_bias": (None, False),
    "mlp_type": (None, "default"),
    "norm_type": (None, "layer_norm"),
    "use_mrope": (None, False),
}
ALWAYS_UNDERSTOOD = frozenset({"original_max_position_embeddings"})  # checked if positions are scaled
MSCALES = frozenset({"short_mscale", "long_mscale"})  # of longrope
CHECKPOINT_KEYS = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
CANONICAL_FILES = {
    "renames": (),
    "interleaved_rope": False,
    "interleaved_gates": False,
    "grouped_qkv": False,
    "normalized_head": False,
    "transposed": "",
    "values_from_keys": frozenset(),
    "qvk_blocks": 0,
    "either_order": False,
    "flat_experts": False,
}
QUANTIZATION_METHODS = (
    "flambeau",
    "gptq",
    "awq",
    "auto-round",
    "compressed-tensors",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "bitsandbytes",
    "torchao",
)
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_THETA = 10000.0
RENAMED_KINDS = {"su": "longrope"}  # of rotary positions


def read_hugging_face(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder; generation_config.json may add end tokens."""
    arch = from_hugging_face(read_config(folder))
    generation = folder / "generation_config.json"
    more = token_ids(read_object(generation, CheckpointError).get("eos_token_id")) if generation.is_file() else ()
    return replace(arch, eos_ids=tuple(dict.fromkeys((*arch.eos_ids, *more))))


def read_config(folder: Path) -> Config:
    """config.json; how weights were quantized may be under another key, or in a file of ModelOpt."""
    config = read_object(folder / "config.json", InvalidConfig)
    compression = config.pop("compression_config", None)
    if compression and not config.get("quantization_config"):
        config["quantization_config"] = {"quant_method": "compressed-tensors", **compression}
    separate = folder / "hf_quant_config.json"
    if separate.is_file() and not config.get("quantization_config"):
        declared = section(read_object(separate, CheckpointError), "quantization")
        if declared.get("quant_algo"):
            config["quantization_config"] = {"quant_method": "modelopt", **declared}
    return config


def from_hugging_face(config: Config) -> Architecture:
    family = family_of(config)
    whole = config
    with values_of_other_kinds(family):
        given = renamed(family.arrange(text_config(config, family)), family)
    config = RecordedConfig({**DEFAULTS, **family.defaults, **given})
    check_supported(config, family)
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    kv_heads = integer(config, "num_key_value_heads", heads) if family.has_kv_heads else heads
    head_size = integer(config, "head_dim", hidden // heads)
    if heads % kv_heads or head_size % 2:
        raise CheckpointError(
            f"{heads} heads of size {head_size} with {kv_heads} key-value heads: the size must be even, "
            "and every key-value head serve as many heads as the others"
        )
    scaling = rope_scaling(config, family)
    has_bias = bool(config.get("attention_bias"))
    with values_of_other_kinds(family):
        derived = family.derive(config) if family.derive is not None else {}
    parts = {**family.parts, **derived}
    if family.text_section and "renames" in derived:  # names of a decoder, beside those of a whole model
        parts["renames"] = (*TEXT_NAMES, *derived["renames"])
    arch = Architecture(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=integer(
            config, "intermediate_size", None if family.mlp_ratio is None else family.mlp_ratio * hidden
        ),
        max_length=max_length(config, scaling),
        norm_epsilon=number(config, family.epsilon_key),
        rope_theta=number(rope_parameters(config, family), "rope_theta", number(config, "rope_theta", DEFAULT_THETA)),
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
        source={**DEFAULTS, **family.defaults, **given},
        activation=activation(config, family),
        renames=family.renames,
        **(experts(config) if family.experts else {}),
    )
    windowed = WINDOW_KEYS if family.windowed != "none" else frozenset()
    understood = HARMLESS | ALWAYS_UNDERSTOOD | windowed | family.understands | config.read
    is_own = section(config, "quantization_config").get("quant_method") == "flambeau"
    parts = parts | CANONICAL_FILES if is_own else parts  # written by us, with Llama's names and arrangement
    arch = replace(arch, **parts, unknown_keys=unknown_keys(given, understood))
    if arch.num_experts % arch.num_expert_groups:
        raise CheckpointError(f"{arch.num_experts} experts cannot be divided into {arch.num_expert_groups} groups")
    least = 0 if len(arch.unrotated_layers) == arch.num_layers else 1
    if arch.rotary_size is not None and (arch.rotary_size % 2 or not least <= arch.rotary_size <= arch.head_size):
        raise CheckpointError(
            f"{arch.rotary_size} of {arch.head_size} dimensions of a head are rotated, which is not supported; "
            "it must be an even number"
        )
    return with_images(arch, family, whole)


@contextmanager
def values_of_other_kinds(family: Family) -> Iterator[None]:
    """Raise InvalidConfig for keys that a family needs, and for values that it does not expect."""
    try:
        yield
    except KeyError as error:
        raise InvalidConfig(f"config.json of {family.model_type} needs {error.args[0]}") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise InvalidConfig(f"config.json has a value that no {family.model_type} has: {error}") from error


def with_images(arch: Architecture, family: Family, whole: Config) -> Architecture:
    """The architecture with the encoder of images, if the family has one."""
    if family.images is not None:
        scale = arch.embedding_scale if family.scales_images else 1.0
        return replace(arch, vision=read_pretrained_vision(family.images, whole, arch.hidden_size, scale))
    if family.vision is None:
        return arch
    if family.vision == "siglip":
        return replace(arch, vision=read_vision(whole, arch.hidden_size))
    return replace(arch, vision=read_grid_vision(family.vision, whole, arch.hidden_size, arch.num_layers))


def text_config(config: Config, family: Family) -> Config:
    """The part of config.json on the language model, with what is said of the whole checkpoint."""
    if family.vision is not None:
        return decoder_config(config) if family.vision == "siglip" else grid_decoder_config(family.vision, config)
    if not family.text_section:
        return config
    text = section(config, family.text_section)
    if not text and family.text_types and "hidden_size" in config:  # older files have no sections
        return config
    if not text:
        raise CheckpointError(f"config.json needs {family.text_section}, the settings of the language model")
    return {**{key: config[key] for key in CHECKPOINT_KEYS if config.get(key) is not None}, **text}


def renamed(config: Config, family: Family) -> dict[str, Any]:
    """config.json with Llama's names of keys; the family's own names come first where a file has both."""
    own = {family.aliases[key]: value for key, value in config.items() if key in family.aliases}
    return {key: value for key, value in config.items() if key not in family.aliases} | own


def activation(config: Config, family: Family) -> Activation:
    name = config.get(family.activation_key) or "silu"
    if name not in ACTIVATIONS or (family.experts and ACTIVATIONS[name] != "silu"):
        known = ["silu"] if family.experts else [*ACTIVATIONS]
        raise CheckpointError(f"{family.activation_key} {name!r} is not supported; supported are {', '.join(known)}")
    return ACTIVATIONS[name]


def check_supported(config: Config, family: Family) -> None:
    """Raise for the first option that the network does not support."""
    for key, values in {**SUPPORTED, **family.supported}.items():
        if key in config and key not in family.understands and config[key] not in values:
            raise CheckpointError(f"{key} {config[key]!r} is not supported; supported is {values[-1]!r}")
    quantization = section(config, "quantization_config") or section(config, "quantization")
    if quantization and "quant_method" not in quantization and "bits" in quantization:
        raise InvalidConfig(
            f"weights of {quantization['bits']} bits in the format of MLX are not supported; use the original "
            "checkpoint and quantize it with `flambeau llm quantize`, or one quantized by GPTQ or AWQ, or a GGUF file"
        )
    if quantization and quantization.get("quant_method") not in (*QUANTIZATION_METHODS, *family.dequantizes):
        raise CheckpointError(
            f"weights quantized by {quantization.get('quant_method')!r} are not supported: "
            "use the original checkpoint and quantize it with `flambeau llm quantize`"
        )


def rope_parameters(config: Config, family: Family) -> Config:
    """The settings of rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""
    given, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    wide, narrow = family.rope_sections
    if family.has_local_rope and isinstance(given.get(wide), Mapping):
        local = section(given, narrow)
        if local.get("rope_type", "default") != "default":
            raise CheckpointError(f"rope type {local['rope_type']!r} of layers with a window is not supported")
        given = given[wide]
        if given.get("rope_type") == "yarn" and not given.get("truncate", True):
            raise CheckpointError(f"rope_parameters.{wide}.truncate is not supported: transformers ignores it")
    parameters = scaling or given  # people add rope_scaling to files that have the other: it replaces all of it
    if scaling and "rope_theta" in given and "rope_theta" not in scaling:
        theta, other = given["rope_theta"], config.get("rope_theta", DEFAULT_THETA)
        if theta is not None and theta != other:
            raise InvalidConfig(
                f"rope_scaling replaces rope_parameters, which alone has rope_theta {theta:g}; without it, it is "
                f"{other:g}. Copy rope_theta into rope_scaling"
            )
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("rope_parameters that differ between types of layers are not supported")
    return {key: value for key, value in parameters.items() if value is not None}


def rope_scaling(config: Config, family: Family) -> RopeScaling | None:
    """How positions are scaled; None: not at all."""
    parameters = rope_parameters(config, family)
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = RENAMED_KINDS.get(kind, kind)
    is_partial = kind != "proportional" and parameters.get("partial_rotary_factor", 1) != 1
    if is_partial and "partial_rotary_factor" not in family.understands:
        raise CheckpointError("partial_rotary_factor is not supported here: the whole head must be rotated")
    if kind == "mrope" and "mrope_section" in family.understands:  # how positions are divided, not how they are scaled
        return None
    if kind in ("default", "dynamic"):  # dynamic has no effect up to max_position_embeddings, where sequences end
        return None
    if kind not in get_args(RopeKind):
        names = ", ".join(("default", "dynamic", *get_args(RopeKind)))
        raise CheckpointError(f"rope type {kind!r} is not supported; supported are {names}")
    trained = integer(config, "max_position_embeddings")
    outside = config.get("original_max_position_embeddings")
    default = trained if kind != "longrope" or outside is None else outside  # Phi-3 has it outside
    original = integer(parameters, "original_max_position_embeddings", default)
    if kind != "linear" and outside is not None and outside != original:
        raise InvalidConfig(
            f"original_max_position_embeddings is {outside} outside of the rope parameters and {original} for them; "
            "put the right one into both places"
        )
    has_mscales = kind == "longrope" and family.understands >= MSCALES
    mscales = {key: number(parameters, key) for key in MSCALES} if has_mscales else {}
    return RopeScaling(
        kind=kind,
        factor=number(parameters, "factor", default_factor(kind, trained, original)),
        original_length=original,
        low_frequency_factor=number(parameters, "low_freq_factor", 1.0),
        high_frequency_factor=number(parameters, "high_freq_factor", 4.0),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        attention_factor=parameters.get("attention_factor", family.attention_factor),
        mscale=parameters.get("mscale"),
        mscale_all_dimensions=parameters.get("mscale_all_dim"),
        truncate=parameters.get("truncate", True),
        proportion=number(parameters, "partial_rotary_factor", 1.0) if kind == "proportional" else 1.0,
        short_factors=long_factors(config, parameters, "short_factor") if kind == "longrope" else (),
        long_factors=long_factors(config, parameters, "long_factor") if kind == "longrope" else (),
        **mscales,
    )


def default_factor(kind: RopeKind, trained: int, original: int) -> float | None:
    """The factor of positions where config.json has none; None: it has to."""
    if kind == "proportional":
        return 1.0
    return trained / original if kind in ("yarn", "longrope") else None


def long_factors(config: Config, parameters: Config, key: str) -> tuple[float, ...]:
    """The factors of all pairs of dimensions that are rotated."""
    factors = parameters.get(key)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = partial_rotation(config).get("rotary_size", head_size)
    if not isinstance(factors, list) or len(factors) != size // 2:
        raise InvalidConfig(f"rope type 'longrope' needs {key}, a list of {size // 2} numbers")
    return tuple(float(factor) for factor in factors)


def max_length(config: Config, scaling: RopeScaling | None) -> int:
    """The longest sequence; Qwen's config.json has the length before YaRN scaling.

    Dual chunk attention (Qwen's models for a million tokens) is like any other up to the end of the first chunk.
    """
    named = integer(config, "max_position_embeddings")
    if chunks := section(config, DUAL_CHUNKS):
        return min(named, integer(chunks, "chunk_size") - integer(chunks, "local_size", 0, least=0))
    return max(named, int(scaling.factor * scaling.original_length)) if scaling and scaling.kind == "yarn" else named


def windows(config: Config, family: Family, length: int) -> tuple[int | None, ...]:
    """The attention window of each layer; empty if no layer has one."""
    is_off = family.switches_window and not config.get("use_sliding_window")
    if family.windowed == "none" or is_off or (config.get("sliding_window") is None and not family.has_local_rope):
        return ()
    window = integer(config, "sliding_window")
    # A window beyond the longest sequence has no effect, but its layers may have rotary positions of their own.
    layers = windowed_layers(config, family) if window < length or family.has_local_rope else frozenset()
    return tuple(window if i in layers else None for i in range(integer(config, "num_hidden_layers"))) if layers else ()


def windowed_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers with a window, in a model that has one."""
    num_layers, named = integer(config, "num_hidden_layers"), config.get("layer_types")
    if named is not None:
        if len(named) != num_layers or not set(named) <= set(LAYER_TYPES):
            raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {', '.join(LAYER_TYPES)}")
        if not family.names_layers and set(named) != {"sliding_attention"}:
            raise CheckpointError(
                f"layer_types are not supported for {family.model_type}: all its layers have the window"
            )
        return frozenset(i for i, kind in enumerate(named) if kind == "sliding_attention")
    if family.windowed == "named":
        return frozenset()
    if family.windowed == "all":
        return frozenset(range(num_layers))
    if family.windowed == "unrotated":
        return unrotated_layers(config, family)
    if family.windowed == "even":
        return frozenset(range(0, num_layers, 2))
    if family.windowed == "pattern":
        every = integer(config, "sliding_window_pattern")
        return frozenset(i for i in range(num_layers) if (i + 1) % every)
    return frozenset(range(integer(config, "max_window_layers", least=0), num_layers))


def unrotated_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers without rotary positions (SmolLM 3), or without a window in models that rotate only those."""
    if not family.is_rotated:
        return frozenset(range(integer(config, "num_hidden_layers")))
    if family.rotates_windows:
        num_layers = integer(config, "num_hidden_layers")
        has_windows = config.get("sliding_window") is not None
        return frozenset(range(num_layers)) - windowed_layers(config, family) if has_windows else frozenset()
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
        raise InvalidConfig(f"config.json has {value!r} for {key}, which must be an object")
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
        raise InvalidConfig(f"config.json needs {key}, a whole number from {least}, not {value!r}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number above 0, required unless there is a default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InvalidConfig(f"config.json needs {key}, a number above 0, not {value!r}")
    return float(value)
