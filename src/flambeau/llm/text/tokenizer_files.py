"""The files of a tokenizer: which exist, and what they contain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.llm.errors import TokenizerError
from flambeau.llm.json_files import read_object

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TEKKEN = "tekken.json"  # Mistral's own
TIKTOKEN, TIKTOKEN_CLASS = "tiktoken.model", "TikTokenTokenizer"  # Kimi's file, and the class that splits its texts
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def find_file(path: Path) -> Path:
    """The tokenizer's file; raises with a remedy if it cannot be one."""
    file = path
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model")
        found = [path / name for name in names if (path / name).is_file()]
        found += sorted(path.glob("tokenizer.model.v*"), reverse=True)  # Mistral's own
        if not found and (path / TEKKEN).is_file():
            found = [path / TEKKEN]
        if not found and (path / TIKTOKEN).is_file():
            splits = read_json(path / "tokenizer_config.json").get("tokenizer_class") == TIKTOKEN_CLASS
            found = [path / TIKTOKEN] if splits else []
        file = found[0] if found else path / names[0]
        if not found and (others := [*path.glob("tiktoken.model"), *sorted(path.glob("*.tiktoken"))]):
            raise TokenizerError(
                f"{path} has only {others[0].name}, whose rules to split text are Python code; put the tokenizer.json "
                "of the same model there, which other copies of it on the hub may have"
            )
        if not found:
            raise TokenizerError(
                f"{path} has none of tokenizer.json, tokenizer.model and tekken.json; put the model's own there"
            )
    try:
        with file.open("rb") as opened:
            first = opened.readline(4096)
    except OSError as error:
        expected = "name a model's folder, a tokenizer.json or a tokenizer.model"
        raise TokenizerError(f"cannot read the tokenizer {file}: {error.strerror}; {expected}") from error
    if not first:
        raise TokenizerError(f"{file} is empty; copy it again from the model's source")
    if first.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{file} is only a Git LFS pointer; fetch the file itself with `git lfs pull`")
    if file.suffix != ".json" and file.name != TIKTOKEN and TIKTOKEN_LINE.fullmatch(first):
        raise TokenizerError(
            f"{file} is a tiktoken file (lines of base64), as Llama 3 has beside its original weights; it lacks the"
            " rules to split text: use the tokenizer.json of the same model in Hugging Face format"
        )
    return file


def read_json(path: Path) -> dict[str, Any]:
    """The content of an optional file; empty if it does not exist."""
    return read_object(path, TokenizerError) if path.is_file() else {}


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on; each is a text or an object with `content`."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


@dataclass(frozen=True, slots=True)
class Strips:
    """Whether the name of a token takes the spaces beside it."""

    left: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that was added to a SentencePiece model."""

    token_id: int
    is_special: bool = True  # and therefore not text
    strips: Strips = Strips()


def added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Tokens added to a SentencePiece vocabulary, by text; special unless declared otherwise."""
    described = settings.get("added_tokens_decoder") or {}
    try:
        tokens = {
            str(token["content"]): AddedToken(
                int(token_id),
                token.get("special") is not False,
                Strips(bool(token.get("lstrip")), bool(token.get("rstrip"))),
            )
            for token_id, token in described.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "must have tokens by their ids, each with its content; copy it again from the model's source"
        raise TokenizerError(f"added_tokens_decoder in {folder / 'tokenizer_config.json'} {text}") from None
    others = read_json(folder / "added_tokens.json")
    return {text: AddedToken(i) for text, i in others.items() if isinstance(i, int)} | tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredToken:
    """What files beside a tokenizer.json say of a token."""

    text: str
    flags: Mapping[str, bool] | None = None  # names of AddedToken's arguments; None: those of the tokenizer's own file
    is_special: bool = False  # whatever the flags are


def older_names(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The names of tokens in special_tokens_map.json, which come first unless tokenizer_config.json has all tokens."""
    return {} if "added_tokens_decoder" in settings else read_json(folder / "special_tokens_map.json")


def declared_tokens(folder: Path, settings: Mapping[str, Any]) -> list[DeclaredToken]:
    """The tokens that transformers adds to those of a tokenizer.json or changes, in the order of their new ids."""
    names = named_values(settings)
    special = {content_of(value) for value in names}
    described = settings.get("added_tokens_decoder")
    if described is None:
        older = read_json(folder / "added_tokens.json")
        described = {i: {"content": text, "normalized": text not in special} for text, i in older.items()}
    try:
        ordered = [token for _, token in sorted((int(i), token) for i, token in described.items())]
        found = [
            DeclaredToken(text=str(token["content"]), flags=flags_of(token), is_special=token["content"] in special)
            for token in ordered
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        text = "must have tokens by their ids, each with its content; copy it again from the model's source"
        raise TokenizerError(f"added_tokens_decoder in {folder / 'tokenizer_config.json'} {text}") from None
    known = {token.text for token in found}
    found += [
        DeclaredToken(text=content_of(value), flags=flags_of(value), is_special=True)
        for value in names
        if content_of(value) not in known
    ]
    lists = (settings.get(key) for key in ("extra_special_tokens", "additional_special_tokens"))
    more = [content_of(value) for value in next((one for one in lists if one and isinstance(one, list)), ())]
    return found + [DeclaredToken(text=text) for text in more if text and text not in known | special]


def named_values(settings: Mapping[str, Any]) -> list[Any]:
    """The tokens that have a name of their own, in the order in which transformers adds them."""
    ours = {key: value for key, value in settings.items() if key.endswith("_token") and content_of(value)}
    extra = settings.get("extra_special_tokens")
    ours |= extra if isinstance(extra, Mapping) else {}
    return [*(ours[name] for name in NAMES if name in ours), *(ours[name] for name in ours if name not in NAMES)]


def content_of(value: Any) -> str:
    """The text of a token that is given as such or as an object; empty for other values."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def flags_of(value: Any) -> Mapping[str, bool] | None:
    return {name: bool(value[name]) for name in FLAGS if name in value} if isinstance(value, Mapping) else None


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
    return []


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a single one is named "default". Files come before tokenizer_config.json."""
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja"} | {file.stem: file for file in others}
    found = {name: read_template(file) for name, file in files.items() if file.is_file()}
    return found if "default" in found else declared_templates(folder, settings) | found


def declared_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of tokenizer_config.json, or of a file that older models with images have."""
    given = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    named = given if isinstance(given, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in named if isinstance(item, dict)]
    return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read the chat template {file}: {error}") from error
