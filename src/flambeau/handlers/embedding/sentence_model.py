"""Reads the files of a sentence-transformers folder; pools token vectors into one of each text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flambeau.errors import HandlerError

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.onnx",
    "onnx/model.onnx",
)
DEFAULT_MAX_LENGTH = 512  # tokens, if no file has a limit
MODES: Mapping[str, Mode] = {  # by the names of sentence-transformers 6
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
SWITCHES: Mapping[str, Mode] = {  # of its earlier versions, in the order in which several are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
SIZES = ("word_embedding_dimension", "embedding_dimension")
TINY = 1e-12
SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "longformer", "mpnet")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModel:
    """Where the files of a model are, and how its vectors are computed."""

    weights: Path
    tokenizer: Path
    config: Mapping[str, Any]
    modes: tuple[Mode, ...]
    normalizes: bool
    max_seq_length: int
    lowercases: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    truncation_side: str | None  # of texts that are too long; None: the tokenizer's own
    truncate_dim: int | None  # vectors are cut to so many numbers, whatever their length is then
    similarity: Similarity


def read_folder(folder: Path) -> SentenceModel:
    """Read a folder; the error for one that is not supported names the file."""
    if not folder.is_dir():
        raise HandlerError(f"there is no folder {folder}; model_path must be the folder of the model's files")
    modules = read_modules(folder)
    inner = folder / modules.get("Transformer", "")
    settings, config = read_json(inner / "sentence_bert_config.json"), read_json(inner / "config.json")
    saved = read_json(folder / "config_sentence_transformers.json")
    pooling = read_json(folder / modules.get("Pooling", "1_Pooling") / "config.json")
    tokens = read_json(inner / "tokenizer_config.json")
    # The model's own limit replaces that of its tokenizer, even with a larger one.
    lengths = settings.get("max_seq_length") or tokens.get("model_max_length"), num_positions(config)
    return SentenceModel(
        weights=find_file(inner, *WEIGHTS),
        tokenizer=find_file(inner, "tokenizer.json"),
        config=config,
        modes=read_modes(pooling) if pooling else default_modes(config),
        normalizes="Normalize" in modules,
        max_seq_length=int(min((length for length in lengths if length), default=DEFAULT_MAX_LENGTH)),
        lowercases=settings.get("do_lower_case") is True,
        prompts=saved.get("prompts") or {},
        default_prompt=saved.get("default_prompt_name"),
        truncation_side=tokens.get("truncation_side"),
        truncate_dim=read_dimensions(saved),
        similarity=read_similarity(saved),
    )


def read_dimensions(saved: Mapping[str, Any]) -> int | None:
    """The size that vectors are cut to; None: they are not."""
    size = saved.get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        raise HandlerError(f"truncate_dim must be a whole number from 1, not {size!r}")
    return size


def read_similarity(saved: Mapping[str, Any]) -> Similarity:
    """How near two vectors are to each other."""
    named: Any = saved.get("similarity_fn_name") or "cosine"
    if named not in get_args(Similarity):
        raise HandlerError(f"similarity_fn_name {named!r} is not supported; it is {', '.join(get_args(Similarity))}")
    return named  # type: ignore[no-any-return]


def num_positions(config: Mapping[str, Any]) -> int | None:
    """The positions that a text may have; some networks count them from the padding token's id on."""
    positions: int | None = config.get("max_position_embeddings")
    if positions is None or config.get("model_type") not in SHIFTED_POSITIONS:
        return positions
    return positions - int(config.get("pad_token_id", 1)) - 1


def read_modules(folder: Path) -> dict[str, str]:
    """The steps of modules.json, kind → folder; empty if there is no such file."""
    steps: dict[str, str] = {}
    for step in read_json(folder / "modules.json", kind=list):
        kind = str(step.get("type", "")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise HandlerError(
                f"modules.json has the step {kind or step}; supported are Transformer, Pooling and Normalize"
            )
        steps[kind] = str(step.get("path", ""))
    return steps


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """The document in a file; an empty one if there is no such file."""
    if not path.is_file():
        return kind()
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise HandlerError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(document, kind):
        raise HandlerError(f"{path.name} must hold a JSON {'object' if kind is dict else 'list'}")
    return document


def find_file(folder: Path, *names: str) -> Path:
    """The first of these files that exists."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise HandlerError(f"there is no {' or '.join(names)} in {folder}; pack it with --extra-files, or set model_path")


Mode = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


def default_modes(config: Mapping[str, Any]) -> tuple[Mode, ...]:
    """Those of a folder without a pooling config: a causal language model has the vector of its last token."""
    name = str((config.get("architectures") or ("",))[0])
    return ("last",) if name.endswith("ForCausalLM") and config.get("is_causal", True) else ("mean",)


def read_modes(document: Mapping[str, Any]) -> tuple[Mode, ...]:
    """The modes that a pooling config names or switches on; mean if it has none."""
    known = {*SWITCHES, *SIZES, "pooling_mode", "include_prompt"}
    if unknown := sorted(key for key, value in document.items() if key not in known and value):
        raise HandlerError(f"the pooling config has {', '.join(unknown)}; supported: {', '.join(sorted(known))}")
    if document.get("include_prompt", True) is False:
        raise HandlerError("the pooling config leaves prompts out of the mean (include_prompt), which is not supported")
    named = document.get("pooling_mode")
    if named is None:
        return tuple(mode for key, mode in SWITCHES.items() if document.get(key) is True) or ("mean",)
    names = named if isinstance(named, list) else [named]
    if not names or any(name not in MODES for name in names):
        raise HandlerError(f"the pooling config has pooling_mode {named!r}; supported: {', '.join(MODES)}")
    return tuple(MODES[name] for name in names)


def pool(hidden_BTD: Any, mask_BT: Any, modes: Sequence[Mode]) -> list[Any]:
    """One result BD per mode; the mask is 1.0 for tokens and 0.0 for padding."""
    return [pool_one(hidden_BTD, mask_BT[:, :, None], mode) for mode in modes]


def pool_one(hidden_BTD: Any, mask_BT1: Any, mode: Mode) -> Any:
    if mode == "cls":
        return hidden_BTD[:, 0]
    if mode == "max":
        found = (hidden_BTD - (1.0 - mask_BT1) * 1e9).max(1)
        return getattr(found, "values", found)  # torch returns (values, indices), NumPy the values
    if mode == "last":
        return (hidden_BTD * (mask_BT1 * (mask_BT1.cumsum(1) == mask_BT1.sum(1)[:, None]))).sum(1)
    if mode == "weighted_mean":  # later tokens count more
        mask_BT1 = mask_BT1 * mask_BT1.cumsum(1)
    total, count = (hidden_BTD * mask_BT1).sum(1), mask_BT1.sum(1)
    return total / (count**0.5 if mode == "mean_sqrt_len" else count)


def normalize(vectors_BD: Any) -> Any:
    """Scale vectors to length one."""
    return vectors_BD / ((vectors_BD * vectors_BD).sum(1)[:, None] ** 0.5).clip(TINY)


def similarity(first_BD: Any, second_BD: Any, kind: Similarity) -> Any:
    """How near each vector is to the other one of its pair; distances are negative."""
    if kind == "cosine":
        first_BD, second_BD = normalize(first_BD), normalize(second_BD)
    if kind in ("cosine", "dot"):
        return (first_BD * second_BD).sum(1)
    apart_BD = abs(first_BD - second_BD)
    return -apart_BD.sum(1) if kind == "manhattan" else -((apart_BD * apart_BD).sum(1) ** 0.5)
