"""Reads the files of a sentence-transformers folder; pools token vectors into one of each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flambeau.errors import HandlerError
from flambeau.handlers.embedding.published_configs import num_trained
from flambeau.handlers.embedding.small_documents import read_json
from flambeau.handlers.embedding.vector_steps import Step, read_step

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
UNLIMITED = 1 << 30  # tokens of a text
STATIC = "static"
READERS = ("Transformer", "Pooling", "StaticEmbedding")  # modules that make a vector of a text
STEPS = ("Dense", "LayerNorm", "Dropout", "Normalize")  # and those that change it
SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "longformer", "mpnet")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModel:
    """Where the files of a model are, and how its vectors are computed."""

    weights: Path
    tokenizer: Path
    config: Mapping[str, Any]
    modes: tuple[Mode, ...]
    steps: tuple[Step, ...]  # between pooling and normalization
    normalizes: bool
    skips_prompt: bool  # the prompt's tokens are not pooled
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
    saved = read_json(folder / "config_sentence_transformers.json")
    check_kind(saved)
    paths = dict(modules)
    if "StaticEmbedding" in paths:
        return static_model(folder, modules, saved)
    inner = folder / paths.get("Transformer", "")
    settings, config = read_json(inner / "sentence_bert_config.json"), read_json(inner / "config.json")
    check_settings(settings)
    pooling = read_json(folder / paths.get("Pooling", "1_Pooling") / "config.json")
    tokens = read_json(inner / "tokenizer_config.json")
    # The model's own limit replaces that of its tokenizer, even with a larger one.
    lengths = settings.get("max_seq_length") or tokens.get("model_max_length"), num_positions(config)
    steps, normalizes = read_steps(folder, modules)
    return SentenceModel(
        weights=find_file(inner, *WEIGHTS),
        tokenizer=find_file(inner, "tokenizer.json"),
        config=config,
        modes=read_modes(pooling) if pooling else default_modes(config),
        steps=steps,
        normalizes=normalizes,
        skips_prompt=pooling.get("include_prompt", True) is False,
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
    positions: int | None = config.get("max_position_embeddings") or num_trained(config)
    if positions is None or config.get("model_type") not in SHIFTED_POSITIONS:
        return positions
    return positions - int(config.get("pad_token_id", 1)) - 1


def static_model(folder: Path, modules: Modules, saved: Mapping[str, Any]) -> SentenceModel:
    """A table with a vector for each token, of which a text has the mean."""
    inner = folder / dict(modules)["StaticEmbedding"]
    steps, normalizes = read_steps(folder, modules)
    return SentenceModel(
        weights=find_file(inner, "model.safetensors", "pytorch_model.bin"),
        tokenizer=find_file(inner, "tokenizer.json"),
        config={"model_type": STATIC},
        modes=("mean",),
        steps=steps,
        normalizes=normalizes,
        skips_prompt=False,
        max_seq_length=UNLIMITED,
        lowercases=False,
        prompts=saved.get("prompts") or {},
        default_prompt=saved.get("default_prompt_name"),
        truncation_side=None,
        truncate_dim=read_dimensions(saved),
        similarity=read_similarity(saved),
    )


def check_kind(saved: Mapping[str, Any]) -> None:
    """Reject folders whose results are no vector of a text."""
    kind = saved.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise HandlerError(
            f"config_sentence_transformers.json describes a {kind}, and sentence_embedder serves models with one dense "
            "vector of a text (SentenceTransformer); write a handler.py for others"
        )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Reject settings that would put texts into a chat template, or change how they are read."""
    if "message" in (settings.get("modality_config") or {}):
        raise HandlerError(
            "sentence_bert_config.json embeds messages of a chat (modality_config), which is not supported"
        )
    if given := settings.get("processing_kwargs"):
        raise HandlerError(f"sentence_bert_config.json has processing_kwargs ({given!r}), which are not supported")


def read_modules(folder: Path) -> Modules:
    """The steps of modules.json in order, kind and folder; empty if there is no such file."""
    found: list[tuple[str, str]] = []
    for step in read_json(folder / "modules.json", kind=list):
        name = str(step.get("type", ""))
        package, _, kind = name.rpartition(".")
        if kind not in (*READERS, *STEPS):
            known = ", ".join((*READERS, *STEPS))
            raise HandlerError(f"modules.json has the step {kind or step}; supported are {known}")
        if not package.startswith("sentence_transformers."):
            raise HandlerError(f"modules.json has the step {name}, which is code of another package and is not run")
        found.append((kind, str(step.get("path", ""))))
    kinds = [kind for kind, _ in found]
    order = [kind for kind in kinds if kind in READERS]
    if kinds and (order not in (["Transformer", "Pooling"], ["StaticEmbedding"]) or kinds[: len(order)] != order):
        raise HandlerError(
            f"modules.json has the steps {', '.join(kinds)}; it must begin with Transformer and Pooling, or with "
            "StaticEmbedding: otherwise a text has no vector, or many"
        )
    return tuple(found)


def read_steps(folder: Path, modules: Modules) -> tuple[tuple[Step, ...], bool]:
    """The steps after pooling, and whether the last one normalizes, which requests may switch off."""
    later = [(kind, path) for kind, path in modules if kind in STEPS and kind != "Dropout"]
    normalizes = bool(later) and later[-1][0] == "Normalize"
    found = [read_step(kind, folder / path) for kind, path in (later[:-1] if normalizes else later)]
    return tuple(step for step in found if step is not None), normalizes


def find_file(folder: Path, *names: str) -> Path:
    """The first of these files that exists."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise HandlerError(f"there is no {' or '.join(names)} in {folder}; pack it with --extra-files, or set model_path")


Modules = tuple[tuple[str, str], ...]  # kind and folder of each
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
    named = document.get("pooling_mode")
    if named is None:
        return tuple(mode for key, mode in SWITCHES.items() if document.get(key) is True) or ("mean",)
    names = named if isinstance(named, list) else [named]
    if not names or any(name not in MODES for name in names):
        raise HandlerError(f"the pooling config has pooling_mode {named!r}; supported: {', '.join(MODES)}")
    return tuple(MODES[name] for name in names)


def pool(hidden_BTD: Any, mask_BT: Any, modes: Sequence[Mode], is_pooled_BT: Any = None) -> list[Any]:
    """One result BD per mode; the mask is 1.0 for tokens and 0.0 for padding.

    `is_pooled_BT` is the same mask without tokens that are not pooled, those of a prompt.
    """
    pooled_BT1 = (mask_BT if is_pooled_BT is None else is_pooled_BT)[:, :, None]
    return [pool_one(hidden_BTD, mask_BT[:, :, None], pooled_BT1, mode) for mode in modes]


def pool_one(hidden_BTD: Any, mask_BT1: Any, pooled_BT1: Any, mode: Mode) -> Any:
    if mode == "max":
        found = (hidden_BTD - (1.0 - pooled_BT1) * 1e9).max(1)
        return getattr(found, "values", found)  # torch returns (values, indices), NumPy the values
    if mode in ("cls", "last"):
        rank_BT1 = pooled_BT1.cumsum(1)
        chosen = rank_BT1 == (1.0 if mode == "cls" else pooled_BT1.sum(1)[:, None])
        return (hidden_BTD * (pooled_BT1 * chosen)).sum(1)
    if mode == "weighted_mean":  # later tokens count more, and those of a prompt are counted
        pooled_BT1 = pooled_BT1 * mask_BT1.cumsum(1)
    total, count = (hidden_BTD * pooled_BT1).sum(1), pooled_BT1.sum(1)
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
