"""EAGLE checkpoints: heads that propose tokens from the hidden states of a model.

They are published with the configuration of a Llama of one layer; what they are shows in their tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoints.checkpoint import open_files
from flambeau.llm.checkpoints.head_weights import SelectedTensors, head_config, load_files
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer

logger = logging.getLogger(__name__)

EAGLE_NAMES: Renames = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
)
TOKEN_MAPS = ("d2t", "t2d")  # which tokens of the target the head's own are; the second follows from the first
HEAD_KEYS = frozenset(
    {
        "draft_vocab_size",
        "target_hidden_size",
        "target_model_type",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "reuse_target_lm_head",
        "additional_fc",
        "num_aux_hidden_states",
        "norm_output",
        "transformer_layer_config",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "embed_requires_grad",
        "bias",
    }
)
UNSUPPORTED = ("use_moe", "parallel_drafting")  # parts that some heads have and this one has not
UNKNOWN_KINDS = {  # by what their architectures are called; their tensors may look like those of others
    "peagle": "P-EAGLE, which proposes all tokens at once",
    "dspark": "DSpark",
    "domino": "Domino",
    "dflash": "DFlash in another form than z-lab's",
    "medusa": "Medusa",
    "mlpspeculator": "an MLP speculator",
}
UNKNOWN_PARTS = {".experts.": "experts", ".kv_a_proj_with_mqa.": "latent attention"}  # by the names of tensors
LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


def is_eagle(path: Path) -> bool:
    """Whether a folder holds an EAGLE head instead of a model; raises LLMError for heads of other kinds."""
    config = head_config(path)
    if not config:
        return False
    given = (*(config.get("architectures") or ()), config.get("speculators_model_type"), config.get("model_type"))
    names = " ".join(str(name) for name in given if name)
    plain = names.lower().replace("_", "") + (" medusa" if "medusa_num_heads" in config else "")
    if kind := next((words for name, words in UNKNOWN_KINDS.items() if name in plain), None):
        raise LLMError(
            f"the head {path} is {kind}, which is not supported; use an EAGLE head, a draft model, or n-grams of the "
            "text (speculative: true, or --speculative lookup)"
        )
    return "eagle" in names.lower() or "draft_vocab_size" in config or "fc.weight" in eagle_tensors(path)


def eagle_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a head by their names, without the prefixes that some files have."""
    return {eagle_name(stored.name): stored for file in open_files(path) for stored in file}


def eagle_name(name: str) -> str:
    for pattern, replacement in EAGLE_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def read_eagle(path: Path, target: Architecture) -> HeadSettings:
    """The shape of an EAGLE head; raises LLMError if it is the head of another model."""
    config, tensors = head_config(path), eagle_tensors(path)
    for key in UNSUPPORTED:
        if config.get(key):
            raise CheckpointError(f"{key} of the EAGLE head {path} is not supported; use a head without it")
    for name, part in UNKNOWN_PARTS.items():
        if any(name in each for each in tensors):
            raise CheckpointError(f"the EAGLE head {path} has {part}, which is not supported; use a head without")
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{path} has the configuration of an EAGLE head, but no tensor fc.weight")
    arch = eagle_architecture(config, target)
    is_third = "layers.0.hidden_norm.weight" in tensors
    head = tensors.get("lm_head.weight") if is_third else None
    settings = HeadSettings(
        kind="eagle3" if is_third else "eagle",
        arch=arch,
        layers=eagle_layers(config, target.num_layers) if is_third else (target.num_layers,),
        state_size=target.hidden_size,
        draft_vocab_size=0 if head is None else head.shape[0],
        has_embeddings="embed_tokens.weight" in tensors,
        has_bias="fc.bias" in tensors,
        norm_before_residual=bool(config.get("norm_before_residual", "transformer_layer_config" in config)),
        norm_before_projection=bool(config.get("norm_before_fc")),
        norms_each="fc_norm.0.weight" in tensors,
        norms_output=bool(config.get("norm_output")),
    )
    check_fit(path, settings, target, tensors)
    if unknown := [key for key in arch.unknown_keys if key not in HEAD_KEYS]:
        logger.warning("config.json of the head %s has keys that have no effect: %s", path, ", ".join(unknown))
    return settings


def eagle_architecture(config: Mapping[str, Any], target: Architecture) -> Architecture:
    """That of its layers, for sequences as long as the target's: rotary positions have no end."""
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    given = {key: value for key, value in layer.items() if key not in HEAD_KEYS and value is not None}
    given |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    given.setdefault("vocab_size", target.vocab_size)
    arch = from_hugging_face(given)
    return replace(arch, max_length=max(arch.max_length, target.max_length), renames=EAGLE_NAMES)


def eagle_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head was trained on.

    At the top of config.json they are named by their inputs, in `eagle_config` by the outputs of the layers before.
    """
    named = next((config[key] for key in LAYER_IDS if config.get(key)), None)
    if named is None and (nested := (config.get("eagle_config") or {}).get(LAYER_IDS[0])):
        named = [int(number) + 1 for number in nested]
    found = tuple(map(int, named)) if named else (2, num_layers // 2, num_layers - 3)
    if min(found) < 0 or max(found) > num_layers:
        raise LLMError(
            f"the EAGLE head reads the layers {', '.join(map(str, found))}, and the model has {num_layers}; use the "
            "head that was trained for this model"
        )
    return found


def check_fit(path: Path, settings: HeadSettings, target: Architecture, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise for the head of a model with another vocabulary or another hidden size."""
    arch, remedy = settings.arch, "use the head that was trained for this model"
    if arch.vocab_size != target.vocab_size:
        raise LLMError(f"the head {path} has {arch.vocab_size} tokens and the model {target.vocab_size}; {remedy}")
    num_states = len(settings.layers) if settings.kind == "eagle3" else 2
    expected, found = num_states * target.hidden_size, tensors["fc.weight"].shape[1]
    if found != expected:
        raise LLMError(
            f"the head {path} reads {found} numbers of a token, and {num_states} hidden states of the model have "
            f"{expected}; {remedy}"
        )
    shares = settings.kind == "eagle" or not settings.has_embeddings
    if shares and arch.hidden_size != target.hidden_size:
        raise LLMError(
            f"the head {path} has hidden states of {arch.hidden_size} numbers and the model of {target.hidden_size}, "
            f"whose embeddings it needs; {remedy}"
        )
    if not settings.has_embeddings and target.embedding_size not in (0, arch.hidden_size):
        raise LLMError(
            f"the head {path} needs embeddings of {arch.hidden_size} numbers, and the model's have "
            f"{target.embedding_size}; use a draft model"
        )
    size = settings.draft_vocab_size
    if size not in (0, target.vocab_size) and "d2t" not in tensors:
        raise CheckpointError(f"the head {path} has {size} tokens of its own, but no tensor d2t that says which")


def target_ids(path: Path, settings: HeadSettings) -> torch.Tensor | None:
    """Which tokens of the target those of the head are; None: the same."""
    stored = eagle_tensors(path).get("d2t") if settings.draft_vocab_size else None
    if stored is None:
        return None
    shifts = stored.read().to(torch.int64)
    found = torch.arange(settings.draft_vocab_size) + shifts if len(shifts) == settings.draft_vocab_size else shifts
    is_valid = len(shifts) == settings.draft_vocab_size and int(found.min()) >= 0
    if not is_valid or int(found.max()) >= settings.arch.vocab_size or len({*found.tolist()}) < len(found):
        raise CheckpointError(f"d2t of the head {path} does not name {settings.draft_vocab_size} tokens of the model")
    return found


def load_eagle(
    path: Path, settings: HeadSettings, target: Transformer, *, device: torch.device, dtype: torch.dtype
) -> DraftHead:
    """An EAGLE head, which shares what it does not have with its target."""
    files: list[WeightFile] = [
        SelectedTensors(file, lambda name: eagle_name(name) not in TOKEN_MAPS) for file in open_files(path)
    ]
    head = load_files(path, files, settings, device=device, dtype=dtype)
    ids = target_ids(path, settings)
    head.target_ids_D = None if ids is None else ids.to(device)
    head.share(target)
    return head
