"""Hugging Face config.json → Architecture; unsupported options are rejected by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.json_files import read_object
from flambeau.llm.models.architecture import Activation, Architecture
from flambeau.llm.models.config_keys import HARMLESS, WINDOW_KEYS, RecordedConfig, unknown_keys
from flambeau.llm.models.config_values import integer, number, section, token_ids
from flambeau.llm.models.families.config_parts import TEXT_NAMES
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.table import family_of
from flambeau.llm.models.grid_vision_config import grid_decoder_config, read_grid_vision
from flambeau.llm.models.position_config import max_length, rope_scaling, rope_theta, unrotated_layers, windows
from flambeau.llm.models.sound_architecture import read_sounds
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
# Families of which transformers does not read norm_topk_prob: weights of experts are always, or never, normalized.
FIXED_NORMALIZATION = frozenset(
    {"mixtral", "phimoe", "ernie4_5_moe", "gpt_oss", "aria_text", "minimax_m2", "afmoe", "hy_v3", "laguna"}
)
ALWAYS_UNDERSTOOD = frozenset({"original_max_position_embeddings"})  # checked if positions are scaled
CHECKPOINT_KEYS = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
OLDER_KEYS = {"llm_config": "text_config", "img_context_token_id": "image_token_id"}
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


def read_hugging_face(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder; generation_config.json may add end tokens."""
    arch = from_hugging_face(read_config(folder))
    generation = folder / "generation_config.json"
    more = token_ids(read_object(generation, CheckpointError).get("eos_token_id")) if generation.is_file() else ()
    return replace(arch, eos_ids=tuple(dict.fromkeys((*arch.eos_ids, *more))))


def read_config(folder: Path) -> Config:
    """config.json; how weights were quantized may be under another key, or in a file of ModelOpt."""
    config = with_newer_keys(of_thinker(read_object(folder / "config.json", InvalidConfig)))
    compression = config.pop("compression_config", None)
    if compression and not config.get("quantization_config"):
        config["quantization_config"] = {"quant_method": "compressed-tensors", **compression}
    separate = folder / "hf_quant_config.json"
    if separate.is_file() and not config.get("quantization_config"):
        declared = section(read_object(separate, CheckpointError), "quantization")
        if declared.get("quant_algo"):
            config["quantization_config"] = {"quant_method": "modelopt", **declared}
    return config


def of_thinker(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the model that reads and writes texts, in files of one that speaks as well (Qwen-Omni)."""
    thinker = section(config, "thinker_config")
    if not thinker:
        return config
    outside = ("architectures", *CHECKPOINT_KEYS)
    return {**thinker, **{key: config[key] for key in outside if config.get(key) is not None}}


def with_newer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The names that transformers has for keys of Nemotron-H-Omni."""
    if config.get("architectures") != ["NemotronH_Omni_Reasoning_V3"]:
        return config
    older = {OLDER_KEYS[key]: value for key, value in config.items() if key in OLDER_KEYS}
    return {**older, **{key: value for key, value in config.items() if key not in OLDER_KEYS and value is not None}}


def from_hugging_face(config: Config) -> Architecture:
    """The architecture that a config.json describes."""
    family = family_of(config)
    whole = config
    with values_of_other_kinds(family):
        check_normalization(text_config(config, family), family)
        given = renamed(family.arrange(text_config(config, family)), family)
    if given.get("rope_parameters", ...) is None:  # in transformers, null and a missing key both mean the defaults
        del given["rope_parameters"]
    config = RecordedConfig({**DEFAULTS, **family.defaults, **given})
    check_supported(config, family)
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    kv_heads = integer(config, "num_key_value_heads", heads) if family.has_kv_heads else heads
    head_size = integer(config, "head_dim", hidden // heads)
    check_heads(heads, kv_heads, head_size)
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
        rope_theta=rope_theta(config, family),
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
    check_sizes(arch)
    return with_sounds(with_images(arch, family, whole), family, whole)


def check_heads(heads: int, kv_heads: int, head_size: int) -> None:
    """Raise for numbers of heads that do not belong together."""
    if heads % kv_heads or head_size % 2:
        raise CheckpointError(
            f"{heads} heads of size {head_size} with {kv_heads} key-value heads: the size must be even, "
            "and every key-value head serve as many heads as the others"
        )


def check_sizes(arch: Architecture) -> None:
    """Raise for groups of experts and rotations that the numbers of experts and dimensions do not allow."""
    if arch.num_experts % arch.num_expert_groups:
        raise CheckpointError(f"{arch.num_experts} experts cannot be divided into {arch.num_expert_groups} groups")
    least = 0 if len(arch.unrotated_layers) == arch.num_layers else 1
    for rotated, size in [(arch.rotary_size, arch.head_size), *((s.rotary_size, s.head_size) for s in arch.shapes)]:
        if rotated is not None and (rotated % 2 or not (0 if arch.shapes else least) <= rotated <= size):
            raise CheckpointError(
                f"{rotated} of {size} dimensions of a head are rotated, which is not supported; "
                "it must be an even number"
            )


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


def with_sounds(arch: Architecture, family: Family, whole: Config) -> Architecture:
    return arch if family.sounds is None else replace(arch, sounds=read_sounds(family.sounds, whole))


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


def check_normalization(given: Config, family: Family) -> None:
    """Raise for norm_topk_prob where it has no effect in transformers; other names of it are not looked at."""
    fixed, named = family.defaults.get("norm_topk_prob", True), given.get("norm_topk_prob")
    if family.model_type in FIXED_NORMALIZATION and named not in (None, fixed):
        raise CheckpointError(f"norm_topk_prob {named!r} is not supported; supported is {fixed!r}")


def is_among(value: Any, values: Sequence[Any]) -> bool:
    """Whether it is one of these values; numbers may have been rounded to float32, as in GGUF files."""
    return value in values or (
        isinstance(value, float) and any(isinstance(one, float) and isclose(value, one, rel_tol=1e-6) for one in values)
    )


def check_supported(config: Config, family: Family) -> None:
    """Raise for the first option that the network does not support."""
    for key, values in {**SUPPORTED, **family.supported}.items():
        if key in config and key not in family.understands and not is_among(config[key], values):
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
