"""DFlash heads in files: those of z-lab, which have the layers of Qwen 3, and Muse Glimmer's assistant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoints.checkpoint import open_files
from flambeau.llm.checkpoints.head_weights import head_config, load_files
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer

MUSE = "MuseGlimmerAssistantModel"
MODELS = ("DFlashDraftModel", MUSE)
BLOCK_NAMES: Renames = (
    (r"^model\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^(layers|norm)\.", r"model.\1."),
)
OWN_KEYS = frozenset({"mask_token_id", "target_layer_ids", "block_size", "causal"})
LAYER_KEYS = (
    *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "quantization_config", "dtype", "torch_dtype"),
)
REMEDY = "use the head that was trained for this model"


def is_block_head(path: Path) -> bool:
    """Whether a folder holds a head that proposes a block of tokens at once."""
    return bool(set(head_config(path).get("architectures") or ()) & set(MODELS))


def read_block_head(path: Path, target: Architecture) -> HeadSettings:
    """The shape of such a head; raises LLMError if it is that of another model."""
    config = head_config(path)
    own = {key: config[key] for key in OWN_KEYS if config.get(key) is not None} | (config.get("dflash_config") or {})
    if unknown := sorted(key for key in own if key not in {*OWN_KEYS, "use_aux_hidden_state"} and own[key]):
        raise CheckpointError(f"dflash_config of the head {path} has {', '.join(unknown)}, which is not supported")
    if config.get("is_neox_style") is False:
        raise CheckpointError(f"is_neox_style False of the head {path} is not supported")
    for key, least in (("block_size", 2), ("mask_token_id", 0)):
        if not isinstance(own.get(key), int) or own[key] < least:
            raise CheckpointError(f"config.json of the head {path} needs {key}, a whole number from {least}")
    given = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    arch = from_hugging_face(
        given | {"architectures": ["Qwen3ForCausalLM"], "vocab_size": target.vocab_size, "tie_word_embeddings": False}
    )
    windows = block_windows(path, config, arch.num_layers)
    settings = HeadSettings(
        kind="dflash",
        arch=replace(
            arch,
            max_length=max(arch.max_length, target.max_length) + own["block_size"],
            windows=windows,
            renames=BLOCK_NAMES,
        ),
        layers=block_layers(own.get("target_layer_ids"), arch.num_layers, target.num_layers),
        state_size=target.hidden_size,
        block_size=own["block_size"],
        mask_id=own["mask_token_id"],
        causal_layers=causal_layers(config.get("is_causal", own.get("causal")), windows, arch.num_layers, config),
    )
    check_block_head(path, settings, target, config)
    return settings


def block_windows(path: Path, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer."""
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    if "sliding_attention" not in kinds:
        return ()
    window = config.get("sliding_window")
    if len(kinds) != num_layers or not isinstance(window, int):
        raise CheckpointError(f"layer_types with windows need a sliding_window, and {num_layers} layers; see {path}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def causal_layers(
    is_causal: bool | None, windows: tuple[int | None, ...], num_layers: int, config: Mapping[str, Any]
) -> frozenset[int]:
    """The layers whose blocks are read back only: those with a window, unless files say so of all or of none.

    So do vLLM and the speculators package; Muse Glimmer's has none in transformers.
    """
    if is_causal is None and MUSE not in config["architectures"]:
        return frozenset(layer for layer, window in enumerate(windows) if window is not None)
    return frozenset(range(num_layers)) if is_causal else frozenset()


def block_layers(given: Any, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs are read; files name those before them, whose outputs these are."""
    if given is None:
        first, last = 1, num_target_layers - 3
        steps = max(1, num_layers - 1)
        given = [round(first + i * (last - first) / steps) for i in range(num_layers)]
        given = [num_target_layers // 2] if num_layers == 1 else given
    found = tuple(int(number) + 1 for number in given)
    if min(found) < 0 or max(found) > num_target_layers:
        raise LLMError(
            f"the DFlash head reads the layers {', '.join(map(str, given))}, and the model has {num_target_layers}; "
            f"{REMEDY}"
        )
    return found


def check_block_head(path: Path, settings: HeadSettings, target: Architecture, config: Mapping[str, Any]) -> None:
    """Raise for the head of a model with another vocabulary or another hidden size."""
    arch, vocab_size, num_layers = settings.arch, config.get("vocab_size"), config.get("num_target_layers")
    if num_layers not in (None, target.num_layers):
        raise LLMError(
            f"the head {path} is for a model of {num_layers} layers, and this one has {target.num_layers}; {REMEDY}"
        )
    if vocab_size not in (None, target.vocab_size) or settings.mask_id >= target.vocab_size:
        tokens = vocab_size if vocab_size not in (None, target.vocab_size) else settings.mask_id + 1
        raise LLMError(f"the head {path} has {tokens} tokens and the model {target.vocab_size}; {REMEDY}")
    if arch.hidden_size != target.hidden_size or target.embedding_size not in (0, arch.hidden_size):
        raise LLMError(
            f"the head {path} has hidden states of {arch.hidden_size} numbers and the model of {target.hidden_size}, "
            f"whose embeddings it needs; {REMEDY}"
        )
    shapes = {stored.name: stored.shape for file in open_files(path) for stored in file}
    found = next((shape[1] for name, shape in shapes.items() if name.endswith("fc.weight")), 0)
    if found != (expected := len(settings.layers) * target.hidden_size):
        raise LLMError(
            f"the head {path} reads {found} numbers of a token, and {len(settings.layers)} hidden states of the model "
            f"have {expected}; {REMEDY}"
        )


def load_block_head(
    path: Path, settings: HeadSettings, target: Transformer, *, device: torch.device, dtype: torch.dtype
) -> DraftHead:
    """Such a head, which takes embeddings and the last layer from its target."""
    head = load_files(path, open_files(path), settings, device=device, dtype=dtype)
    head.share(target)
    return head
