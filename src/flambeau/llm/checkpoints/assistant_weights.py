"""Gemma 4's drafters in files: a small Gemma 4 without keys and values of its own, and its two projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from flambeau.llm.checkpoints.checkpoint import open_files
from flambeau.llm.checkpoints.head_weights import SelectedTensors, head_config, load_files
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.assistant_head import AssistantHead
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer

MODELS = {
    "gemma4_assistant": "Gemma4ForCausalLM",
    "gemma4_unified_assistant": "Gemma4UnifiedForCausalLM",
}
UNSUPPORTED = ("enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input")
ORDER = "masked_embedding.token_ordering"  # the tokens of all clusters, one cluster after another
EMBEDDINGS, LAST_LAYER = "model.embed_tokens.weight", "lm_head.weight"  # the same; the first are in the files
REMEDY = "use the drafter that was published for this model"


def is_assistant(path: Path) -> bool:
    """Whether a folder holds a drafter that reads the keys and values of its target."""
    return head_config(path).get("model_type") in MODELS


def read_assistant(path: Path, target: Architecture) -> HeadSettings:
    """The shape of a drafter; raises LLMError if it is that of another model."""
    config = head_config(path)
    text = config.get("text_config") or {}
    for key in UNSUPPORTED:
        if text.get(key):
            raise CheckpointError(f"{key} {text[key]!r} of the drafter {path} is not supported; {REMEDY}")
    own = from_hugging_face(
        {key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if config.get(key)}
        | {key: value for key, value in text.items() if value is not None}
        | {"architectures": [MODELS[config["model_type"]]], "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "tie_word_embeddings": False}
    )
    state_size = int(config.get("backbone_hidden_size") or 0)
    check_assistant(path, own, state_size, target)
    sources = [source_layer(path, own, layer, target) for layer in range(own.num_layers)]
    arch = replace(
        own,
        shared_keys=tuple(own.num_layers + source for source in sources),
        values_from_keys=frozenset(),
        # A token of its own would be the first of the window, and one more is read, as in transformers.
        windows=tuple(None if window is None else window + 1 for window in own.windows),
        max_length=max(own.max_length, target.max_length),
        renames=((r"^model\.embed_tokens\.", "lm_head."), *own.renames),
    )
    has_clusters = bool(config.get("use_ordered_embeddings"))
    number = int(config.get("num_centroids") or 0) if has_clusters else 0
    if has_clusters and (number < 1 or arch.vocab_size % number):
        raise CheckpointError(
            f"the drafter {path} has {number} clusters of {arch.vocab_size} tokens, which must be equally large"
        )
    num_chosen = int(config.get("centroid_intermediate_top_k") or 0)
    if has_clusters and num_chosen < 1:
        raise CheckpointError(f"config.json of the drafter {path} needs centroid_intermediate_top_k, a number from 1")
    return HeadSettings(
        kind="assistant",
        arch=arch,
        layers=(target.num_layers,),
        state_size=state_size,
        draft_vocab_size=arch.vocab_size,
        num_clusters=number,
        num_chosen_clusters=min(number, num_chosen),
    )


def check_assistant(path: Path, own: Architecture, state_size: int, target: Architecture) -> None:
    """Raise for the drafter of a model of another family, vocabulary or hidden size."""
    if not (target.scales_layers and target.normalizes_values and target.windows):
        raise LLMError(
            f"the drafter {path} reads the keys and values of a Gemma 4, and this model is none; use a draft model "
            "with this model's vocabulary, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    if own.vocab_size != target.vocab_size:
        raise LLMError(f"the drafter {path} has {own.vocab_size} tokens and the model {target.vocab_size}; {REMEDY}")
    if state_size != target.hidden_size:
        raise LLMError(
            f"the drafter {path} reads hidden states of {state_size} numbers, and the model's have "
            f"{target.hidden_size}; {REMEDY}"
        )


def source_layer(path: Path, own: Architecture, layer: int, target: Architecture) -> int:
    """The layer of the target whose keys and values one of the head's reads: the last of its kind that has any."""
    has_window, one = own.window(layer) is not None, own.of_layer(layer)
    kind = "with a window" if has_window else "without a window"
    found = [i for i in sorted(target.caching_layers) if (target.window(i) is not None) == has_window]
    if not found:
        raise LLMError(f"the drafter {path} reads keys of a layer {kind}, and the model has none; {REMEDY}")
    given = target.of_layer(found[-1])
    if (one.num_kv_heads, one.head_size) != (given.num_kv_heads, given.head_size):
        raise LLMError(
            f"the drafter {path} reads keys of {one.num_kv_heads} heads of {one.head_size} numbers in layers {kind}, "
            f"and the model has {given.num_kv_heads} of {given.head_size}; {REMEDY}"
        )
    if own.window(layer) != target.window(found[-1]):
        raise LLMError(
            f"the drafter {path} has a window of {own.window(layer)} tokens, and the model one of "
            f"{target.window(found[-1])}; {REMEDY}"
        )
    return found[-1]


def load_assistant(
    path: Path, settings: HeadSettings, target: Transformer, *, device: torch.device, dtype: torch.dtype
) -> DraftHead:
    """A drafter, which shares embeddings and keys with its target."""
    stored = {one.name: one for file in open_files(path) for one in file}
    left_out = {ORDER} | ({EMBEDDINGS} if LAST_LAYER in stored else set())
    files: list[WeightFile] = [SelectedTensors(file, lambda name: name not in left_out) for file in open_files(path)]
    head = load_files(path, files, settings, device=device, dtype=dtype)
    assert isinstance(head, AssistantHead)
    if head.masked_embedding is not None:
        head.masked_embedding.tokens_CN = clusters(path, settings, stored).to(device)
    head.share(target)
    return head


def clusters(path: Path, settings: HeadSettings, stored: Mapping[str, StoredTensor]) -> torch.Tensor:
    """The tokens of each cluster [C, N]."""
    if ORDER not in stored:
        raise CheckpointError(f"the drafter {path} has no tensor {ORDER}, which names the tokens of its clusters")
    tokens = stored[ORDER].read().to(torch.int64)
    if not torch.equal(tokens.sort().values, torch.arange(settings.draft_vocab_size)):
        raise CheckpointError(f"{ORDER} of the drafter {path} does not name each token of the model once")
    return tokens.view(settings.num_clusters, -1)
