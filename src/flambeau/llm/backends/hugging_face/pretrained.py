"""Reads a checkpoint with transformers: which class it is, whether all weights are there, and its limits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.errors import CheckpointError
from flambeau.llm.json_files import read_object
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.config_values import token_ids
from flambeau.llm.models.hugging_face import read_config
from flambeau.llm.transformers_package import check_weights, first_lines, import_transformers, quiet

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "context_length",
    "max_sequence_length",
    "n_ctx",
)
UNLIMITED = 32_768  # tokens of a sequence where config.json has no limit


def read_pretrained(path: Path, *, device: torch.device, dtype: torch.dtype, trusts_code: bool) -> Any:
    """The network of a folder on its device; raises CheckpointError if transformers cannot load all of it."""
    transformers = import_transformers()
    cls = model_class(transformers, read_config(path), trusts_code=trusts_code)
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "trust_remote_code": trusts_code}
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        options["device_map"] = {"": device}  # straight to the device
    try:
        with quiet():
            model, info = cls.from_pretrained(path, output_loading_info=True, **options)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"transformers cannot load {path}: {first_lines(error)}") from error
    check_weights(path, info)
    return model.to(device).eval().requires_grad_(False)


def model_class(transformers: Any, config: Mapping[str, Any], *, trusts_code: bool) -> Any:
    """The class that reads the checkpoint; raises for what does not write text token by token."""
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    what = str(names[0]) if names else f"model_type {config.get('model_type')!r}"
    known = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    by_type = known.get(config.get("model_type"))
    if by_type is not None and (not names or what == by_type):
        return transformers.AutoModelForCausalLM
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        if trusts_code:
            return transformers.AutoModelForCausalLM
        raise CheckpointError(
            f"{what} is Python code in the checkpoint's folder, which is not run; if you trust its author, set "
            "`handler: {trust_remote_code: true}` in its model-config.yaml, and use `flambeau serve FOLDER`"
        )
    found = getattr(transformers, what, None) if names else None
    if found is None:
        raise CheckpointError(f"transformers {transformers.__version__} has no {what}; a newer version may have it")
    if by_type is not None and what in known.values():
        raise CheckpointError(
            f"config.json names {what} and has the model_type {config['model_type']!r}, which is {by_type}; copy it "
            "again from the model's source"
        )
    if config.get("is_encoder_decoder") or not getattr(found, "can_generate", bool)():
        raise CheckpointError(
            f"{what} is not a network that continues a text token by token; serve models of other tasks with "
            "`flambeau serve FOLDER` instead of `flambeau llm serve`, and without `handler: gpt_handler`"
        )
    return found


def read_limits(path: Path, *, trusts_code: bool) -> Architecture:
    """What the engine needs to know of a network of transformers before it is loaded: its limits and end tokens."""
    transformers = import_transformers()
    declared = read_config(path)
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trusts_code)
        text = config.get_text_config(decoder=True)
        values: Mapping[str, Any] = {**declared, **text.to_dict(), **{k: getattr(text, k, None) for k in LENGTH_KEYS}}
        known = config.dtype
    except (ImportError, KeyError, OSError, TypeError, ValueError):  # loading it fails too, and says more
        values, known = declared, None
    generation = path / "generation_config.json"
    more = read_object(generation, CheckpointError) if generation.is_file() else {}
    ends = (*token_ids(values.get("eos_token_id")), *token_ids(more.get("eos_token_id")))
    return Architecture(
        vocab_size=whole(values, "vocab_size") or 1,
        hidden_size=whole(values, "hidden_size") or 1,
        num_layers=whole(values, "num_hidden_layers") or 1,
        num_heads=whole(values, "num_attention_heads") or 1,
        num_kv_heads=whole(values, "num_key_value_heads") or whole(values, "num_attention_heads") or 1,
        head_size=whole(values, "head_dim") or 1,
        intermediate_size=whole(values, "intermediate_size") or 1,
        max_length=next(filter(None, (whole(values, key) for key in LENGTH_KEYS)), UNLIMITED),
        eos_ids=tuple(dict.fromkeys(ends)),
        bos_id=values.get("bos_token_id") if isinstance(values.get("bos_token_id"), int) else None,
        dtype=str(known or declared.get("dtype") or declared.get("torch_dtype") or "float32").removeprefix("torch."),
        source={key: value for key, value in declared.items() if key != "quantization_config"},
    )


def whole(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
