"""The vocabulary of a GGUF file, as the library that the model was trained with has it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flambeau.llm.errors import TokenizerError
from flambeau.llm.gguf_header import GgufHeader
from flambeau.llm.text.gguf_splits import SPLITS, SplitRule
from flambeau.llm.text.tokenizer_files import Strips
from flambeau.llm.text.vocabulary import (
    SPACE,
    SentencePieceVocabulary,
    TokenizersVocabulary,
    Vocabulary,
    open_sentencepiece,
)

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # types of tokens
NAMED = (CONTROL, USER_DEFINED)
REMEDY = "name the model's own tokenizer.json or tokenizer.model with tokenizer_path (--tokenizer)"


def gguf_vocabulary(header: GgufHeader) -> Vocabulary:
    """The vocabulary; raises for one whose rules are not known."""
    kind = value(header, "model")
    if kind == "llama":
        return sentencepiece_vocabulary(header)
    if kind == "gpt2":
        return byte_level_vocabulary(header)
    if kind == "gemma4":
        return tokenizers_vocabulary(header, lambda: character_tokenizer(header), begins=True)
    raise TokenizerError(f"{header.path} has a tokenizer of the kind {kind!r}, which is not supported; {REMEDY}")


def value(header: GgufHeader, key: str, default: Any = None) -> Any:
    return header.values.get(f"tokenizer.ggml.{key}", default)


def named_tokens(header: GgufHeader) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    texts: Sequence[str] = tokens_of(header)
    ids = {f"{ours}_token": value(header, f"{theirs}_token_id") for theirs, ours in keys.items()}
    return {name: texts[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(texts)}


def tokens_of(header: GgufHeader) -> list[str]:
    tokens = value(header, "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{header.path} has no tokens; {REMEDY}")
    return tokens


def types_of(header: GgufHeader) -> list[int]:
    types: list[int] = value(header, "token_type") or [1] * len(tokens_of(header))
    if len(types) != len(tokens_of(header)):
        raise TokenizerError(f"{header.path} has {len(tokens_of(header))} tokens and {len(types)} types of them")
    return types


# ---- byte-level pairs ----


def byte_level_vocabulary(header: GgufHeader) -> TokenizersVocabulary:
    """Pairs of bytes, merged by rank."""
    name = str(value(header, "pre", "default"))
    if name not in SPLITS:
        raise TokenizerError(
            f"{header.path} splits text by the rules {name!r}, which are not known; known are {', '.join(SPLITS)}. "
            f"To use it, {REMEDY}"
        )
    rule = SPLITS[name]
    return tokenizers_vocabulary(header, lambda: byte_level_tokenizer(header, rule), begins=rule.begins)


def tokenizers_vocabulary(header: GgufHeader, build: Callable[[], Any], *, begins: bool) -> TokenizersVocabulary:
    """A vocabulary of merges; texts begin with BOS if the file says so, or by default."""
    try:
        tokenizer = build()
    except ImportError as error:
        raise TokenizerError(f"{header.path} needs tokenizers: pip install flambeau[llm]") from error
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the tokenizer in {header.path} cannot be used: {error}; {REMEDY}") from error
    add_begin(tokenizer, header, default=begins)
    return TokenizersVocabulary(tokenizer, named_tokens(header))


def byte_level_tokenizer(header: GgufHeader, rule: SplitRule) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(**pairs_of(header), ignore_merges=rule.takes_words))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(step), "isolated") for step in rule.steps]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    add_names(tokenizer, header)
    return tokenizer


def pairs_of(header: GgufHeader) -> dict[str, Any]:
    """The tokens by their ids, and which of them are merged."""
    merges = [tuple(merge.split(" ", 1)) for merge in value(header, "merges", [])]
    return {"vocab": {token: i for i, token in enumerate(tokens_of(header))}, "merges": merges}


def add_names(tokenizer: Any, header: GgufHeader) -> None:
    """Let tokens with a name be found in a text before all merges."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens_of(header), types_of(header), strict=True)
        if kind in NAMED
    ]
    tokenizer.add_tokens(added)


def character_tokenizer(header: GgufHeader) -> Any:
    """Pairs of characters across whole lines, with bytes for characters that are no token (Gemma 4)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = named_tokens(header).get("unk_token", "<unk>")
    tokenizer = Tokenizer(models.BPE(**pairs_of(header), fuse_unk=True, unk_token=unknown, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    add_names(tokenizer, header)
    return tokenizer


def add_begin(tokenizer: Any, header: GgufHeader, *, default: bool) -> None:
    """Let texts begin with BOS if the model's do."""
    token = named_tokens(header).get("bos_token")
    if token is not None and value(header, "add_bos_token", default):
        from tokenizers import processors

        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, value(header, "bos_token_id"))]
        )


# ---- SentencePiece ----


def sentencepiece_vocabulary(header: GgufHeader) -> SentencePieceVocabulary:
    processor = open_sentencepiece(sentencepiece_model(header), str(header.path))
    add_bos = bool(value(header, "add_bos_token", True))
    return SentencePieceVocabulary(processor, {}, add_bos=add_bos, strips=stripped_names(header))


def stripped_names(header: GgufHeader) -> dict[str, Strips]:
    """Names that take the spaces behind them, which a GGUF file does not tell: those of Phi-3 do."""
    if header.architecture != "phi3":
        return {}
    special = [text for text, kind in zip(tokens_of(header), types_of(header), strict=True) if kind in NAMED]
    return {text: Strips(right=True) for text in special if text not in ("<unk>", "<s>", "<|endoftext|>")}


def piece_types(header: GgufHeader) -> list[int]:
    """The types of the tokens; SentencePiece has exactly one unknown piece, and files fill up with others."""
    types = types_of(header)
    given = value(header, "unknown_token_id")
    unknown = given if isinstance(given, int) and 0 <= given < len(types) else None
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    return [UNKNOWN if i == unknown else UNUSED if kind == UNKNOWN else kind for i, kind in enumerate(types)]


def sentencepiece_model(header: GgufHeader) -> bytes:
    """The file of SentencePiece that the tokens come from; its format is a protocol buffer."""
    tokens, types = tokens_of(header), piece_types(header)
    scores = value(header, "scores") or [0.0] * len(tokens)
    if len(scores) != len(tokens):
        raise TokenizerError(f"{header.path} has {len(tokens)} tokens and {len(scores)} scores of them")
    pieces = [
        message(1, text(1, piece(token, kind)) + b"\x15" + struct.pack("<f", score) + number(3, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    ]
    return b"".join(pieces) + message(2, trainer(header, tokens, types)) + message(3, normalizer(header))


def piece(token: str, kind: int) -> str:
    """A token as SentencePiece has it: GGUF files have plain spaces in user-defined ones, as Gemma's runs of spaces."""
    return token.replace(" ", SPACE) if kind == USER_DEFINED else token


def trainer(header: GgufHeader, tokens: Sequence[str], types: Sequence[int]) -> bytes:
    """The kind of the model (pairs, with bytes for unknown characters if there are such), and its special pieces."""
    num_bytes = types.count(BYTE)
    if num_bytes not in (0, 256):
        raise TokenizerError(
            f"{header.path} has tokens for {num_bytes} of 256 bytes, and SentencePiece needs all or none; "
            "set tokenizer_path to the model's tokenizer.json"
        )
    names: Mapping[str, str] = named_tokens(header)
    unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else names.get("unk_token", "<unk>")
    special = {45: unknown, 46: names.get("bos_token"), 47: names.get("eos_token"), 48: names.get("pad_token")}
    return (
        number(3, 2)
        + number(35, num_bytes > 0)
        + b"".join(text(field, name) for field, name in special.items() if name)
    )


def normalizer(header: GgufHeader) -> bytes:
    """No change of characters; spaces become a visible sign, and one may be put before a text."""
    has_prefix = bool(value(header, "add_space_prefix", True))
    removes_spaces = bool(value(header, "remove_extra_whitespaces", False))
    return text(1, "identity") + number(3, has_prefix) + number(4, removes_spaces) + number(5, 1)


def varint(size: int) -> bytes:
    """A whole number, seven bits a byte."""
    parts = []
    while size > 127:
        parts.append(size & 127 | 128)
        size >>= 7
    return bytes((*parts, size))


def number(field: int, content: int) -> bytes:
    return varint(field << 3) + varint(int(content))


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def text(field: int, content: str) -> bytes:
    return message(field, content.encode())
