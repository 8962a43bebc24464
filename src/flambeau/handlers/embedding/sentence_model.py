"""Reads the files of a sentence-transformers folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError
from flambeau.handlers.embedding.pooling import Mode, read_modes

WEIGHTS = ("model.safetensors", "model.onnx", "onnx/model.onnx")
DEFAULT_MAX_LENGTH = 512  # tokens, if no file has a limit


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


def read_folder(folder: Path) -> SentenceModel:
    """Read a folder; the error for one that is not supported names the file."""
    if not folder.is_dir():
        raise HandlerError(f"there is no folder {folder}; model_path must be the folder of the model's files")
    modules = read_modules(folder)
    inner = folder / modules.get("Transformer", "")
    settings, config = read_json(inner / "sentence_bert_config.json"), read_json(inner / "config.json")
    prompts = read_json(folder / "config_sentence_transformers.json")
    lengths = (
        settings.get("max_seq_length"),
        read_json(inner / "tokenizer_config.json").get("model_max_length"),
        config.get("max_position_embeddings"),
    )
    return SentenceModel(
        weights=find_file(inner, *WEIGHTS),
        tokenizer=find_file(inner, "tokenizer.json"),
        config=config,
        modes=read_modes(read_json(folder / modules.get("Pooling", "1_Pooling") / "config.json")),
        normalizes="Normalize" in modules,
        max_seq_length=int(min((length for length in lengths if length), default=DEFAULT_MAX_LENGTH)),
        lowercases=settings.get("do_lower_case") is True,
        prompts=prompts.get("prompts") or {},
        default_prompt=prompts.get("default_prompt_name"),
    )


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
