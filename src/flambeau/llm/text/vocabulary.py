"""Vocabulary: text → ids, and the bytes of each id, from tokenizers' or SentencePiece's file."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from flambeau.llm.errors import InvalidRequest, TokenizerError
from flambeau.llm.text.detokenizer import EACH_BYTE, LeadingSpaces
from flambeau.llm.text.tokenizer_files import FLAGS, AddedToken, DeclaredToken, Strips

SPACE = "\u2581"  # how SentencePiece writes a space
LONG_TEXT = 2000  # characters: about a millisecond
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """A tokenizer file as the Tokenizer uses it; there are two kinds."""

    size: int  # added tokens too
    num_base: int  # ids that text produces, without added tokens
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    special_ids: Mapping[str, int]  # control tokens, which are not text
    named_ids: Mapping[str, int]  # tokens that only their names in a template produce
    strips: Mapping[str, Strips]  # of those that take the spaces beside them
    leading_spaces: LeadingSpaces
    has_bytes: bool  # each token has bytes of its own; otherwise `decode` is needed
    byte_errors: str  # how bytes that are no text are shown: an error handler of Python's codecs
    finds_special: bool  # `encode` turns "<s>" into the token of that name

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text."""

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text; names of special tokens are plain text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token: the name of a special token, nothing for an unknown id."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens, without special tokens."""

    def piece(self, token_id: int) -> str:
        """A token as the file spells it. Raises IndexError for an unknown id."""

    def piece_id(self, piece: str) -> int | None:
        """The id of a token as the file spells it."""


def check_unicode(text: str) -> None:
    """Reject half a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: {error.reason} at character {error.start}", "prompt"
        ) from None


class SentencePieceVocabulary:
    """A SentencePiece `.model`. Text never produces a control piece such as "<s>"; only its id does."""

    has_bytes = True
    byte_errors = EACH_BYTE
    finds_special = False

    def __init__(
        self,
        processor: Any,
        added: Mapping[str, AddedToken],
        add_bos: bool = True,
        strips: Mapping[str, Strips] = MappingProxyType({}),
    ) -> None:
        self._processor = p = processor
        self.strips: Mapping[str, Strips] = {**strips, **{text: token.strips for text, token in added.items()}}
        self._pieces = self.num_base = p.vocab_size()
        declared = {text: token.token_id for text, token in added.items() if token.is_special}
        own = {text: i for text, i in declared.items() if i < self._pieces and is_user_defined(p, i, text)}
        self._own_names = re.compile("|".join(map(re.escape, own)) or "(?!)")
        added = {text: token for text, token in added.items() if token.token_id >= self._pieces}
        self._added = {token.token_id: text for text, token in added.items()}
        self.size = max(self._pieces, *self._added, -1) + 1 if self._added else self._pieces
        self.bos_id = p.bos_id() if p.bos_id() >= 0 else None
        self.eos_id = p.eos_id() if p.eos_id() >= 0 else None
        self.unk_id = p.unk_id() if p.unk_id() >= 0 else None
        self.pad_id = p.pad_id() if p.pad_id() >= 0 else None
        self._add_bos = add_bos and self.bos_id is not None
        controls = {p.id_to_piece(i): i for i in range(self._pieces) if p.is_control(i)} | own
        special = {text: token.token_id for text, token in added.items() if token.is_special}
        self.special_ids: Mapping[str, int] = controls | special
        self.named_ids: Mapping[str, int] = controls | {text: token.token_id for text, token in added.items()}
        self.leading_spaces: LeadingSpaces = dropped_spaces(p)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text, with BOS before them."""
        begin = [self.bos_id] if add_special and self._add_bos and self.bos_id is not None else []
        return begin + self._ids(text)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text; special pieces that the library would find in it are cut."""
        cuts = [0, *(found.start() + 1 for found in self._own_names.finditer(text)), len(text)]
        return [token_id for i, j in pairwise(cuts) for token_id in self._ids(text[i:j])]

    def _ids(self, text: str) -> list[int]:
        check_unicode(text)
        ids: list[int] = self._processor.encode(text)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._pieces:
            return self._added.get(token_id, "").encode()
        piece: str = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        if self._processor.is_unknown(token_id):
            return " \u2047 ".encode()  # as SentencePiece shows it
        return piece.replace(SPACE, " ").encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Not used: pieces have bytes."""
        raise NotImplementedError

    def piece(self, token_id: int) -> str:
        if token_id in self._added:
            return self._added[token_id]
        if not 0 <= token_id < self._pieces:
            raise IndexError(f"the vocabulary has the ids 0 … {self.size - 1}, not {token_id}")
        return str(self._processor.id_to_piece(token_id))

    def piece_id(self, piece: str) -> int | None:
        added = next((i for i, text in self._added.items() if text == piece), None)
        if added is not None:
            return added
        found: int = self._processor.piece_to_id(piece)
        return None if found == self.unk_id and self._processor.id_to_piece(found) != piece else found


def is_user_defined(processor: Any, token_id: int, text: str) -> bool:
    """Whether a piece is found in any text, whatever is around it."""
    is_other = processor.is_control(token_id) or processor.is_unknown(token_id) or processor.is_byte(token_id)
    return not is_other and processor.id_to_piece(token_id) == text


def open_sentencepiece(content: bytes, source: str) -> Any:
    """A processor of the library; `source` is named in errors."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise TokenizerError(f"{source} needs sentencepiece: pip install flambeau[llm]") from error
    try:
        return SentencePieceProcessor(model_proto=content)
    except Exception as error:  # the library raises several kinds of exceptions
        raise TokenizerError(f"{source} is not a SentencePiece model: {error}") from error


def dropped_spaces(processor: Any) -> LeadingSpaces:
    """What a model does with leading spaces, found by decoding some."""
    pieces = ((i, processor.id_to_piece(i)) for i in range(processor.vocab_size()))
    first = next((i for i, piece in pieces if piece.startswith(SPACE) and not piece.startswith(2 * SPACE)), None)
    if first is None or processor.decode([first]).startswith(" "):
        return "keep"
    space = processor.piece_to_id(SPACE)
    return "drop one" if processor.decode([space, space]) == " " else "drop all"


class SharedSetting:
    """A setting of an object that threads use beside each other as long as they need the same value; first: False."""

    def __init__(self, set_value: Callable[[bool], None]) -> None:
        self._set_value = set_value
        self._value = False
        self._num_users = 0
        self._changed = threading.Condition()

    @contextmanager
    def as_value(self, value: bool) -> Iterator[None]:
        """Waits for the threads that need the other value."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_users == 0 or self._value == value)
            if self._value != value:
                self._set_value(value)
                self._value = value
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()


class TokenizersVocabulary:
    """A `tokenizer.json`. Added tokens are found in text, special ones too, as in the original library."""

    finds_special = True

    def __init__(self, tokenizer: Any, tokens: Mapping[str, str], declared: Sequence[DeclaredToken] = ()) -> None:
        self._tokenizer = t = tokenizer
        self._plain = SharedSetting(self._set_plain)
        before = {token.content for token in t.get_added_tokens_decoder().values() if token.special}
        add_declared(t, declared)
        self._added = {i: str(token.content) for i, token in t.get_added_tokens_decoder().items()}
        self.special_ids: Mapping[str, int] = {
            token.content: i
            for i, token in t.get_added_tokens_decoder().items()
            if token.special or token.content in before  # which the library does not forget
        }
        self._special = frozenset(self.special_ids.values())
        self.named_ids: Mapping[str, int] = self.special_ids  # other added tokens are found in any text
        self.strips: Mapping[str, Strips] = {
            token.content: Strips(token.lstrip, token.rstrip) for token in t.get_added_tokens_decoder().values()
        }
        self.size = max(t.get_vocab_size(), *(i + 1 for i in self._added), 0)
        self.num_base = t.get_vocab_size(with_added_tokens=False)
        begin = t.encode("").ids  # the ids before an empty text: BOS, if there is one
        self.bos_id = t.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else begin[0] if begin else None
        self.eos_id = t.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
        self.unk_id = t.token_to_id(tokens["unk_token"]) if "unk_token" in tokens else None
        self.pad_id = t.token_to_id(tokens["pad_token"]) if "pad_token" in tokens else None
        # As JSON it is what its pickle has; that of the whole tokenizer takes as long as reading it.
        steps = decoder_steps(None if t.decoder is None else json.loads(t.decoder.__getstate__()))
        self.has_bytes = steps is not None
        self._is_byte_level = steps == ["ByteLevel"]
        self._has_byte_fallback = steps is not None and "ByteFallback" in steps
        self.byte_errors = EACH_BYTE if self._has_byte_fallback else "replace"
        self.leading_spaces: LeadingSpaces = "drop one" if steps is not None and "Strip" in steps else "keep"

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text, with those that the post-processor adds."""
        check_unicode(text)
        with self._plain.as_value(False):
            return self._ids(text, add_special=add_special)

    def _set_plain(self, value: bool) -> None:
        self._tokenizer.encode_special_tokens = value

    def _ids(self, text: str, *, add_special: bool) -> list[int]:
        """A long text is a batch of one: for a batch the library releases Python's lock, for a text it does not."""
        if len(text) < LONG_TEXT:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text; names of special tokens are plain text."""
        check_unicode(text)
        with self._plain.as_value(True):
            return self._ids(text, add_special=False)

    def piece(self, token_id: int) -> str:
        token: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.size else None
        if token is None:
            raise IndexError(f"the vocabulary has the ids 0 … {self.size - 1}, not {token_id}")
        return token

    def piece_id(self, piece: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(piece)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        if token_id in self._special or (self._is_byte_level and token_id in self._added):
            return self._added[token_id].encode()
        token: str = self._tokenizer.id_to_token(token_id) or ""  # of an added token: as the normalizer writes it
        if not self.has_bytes:
            return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()
        if self._is_byte_level:
            return byte_level_bytes(token)
        byte = BYTE_PIECE.fullmatch(token) if self._has_byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def add_declared(tokenizer: Any, declared: Sequence[DeclaredToken]) -> None:
    """Add and change tokens of a tokenizer as transformers does; new ones get the next ids."""
    from tokenizers import AddedToken as LibraryToken

    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    changed = []
    for token in declared:
        own = known.get(token.text)
        if token.flags is None and own is not None and (own.special or not token.is_special):
            continue
        flags: dict[str, bool] = {"special": True} if token.flags is None else dict(token.flags)
        if token.flags is None and own is not None:
            flags = {name: getattr(own, name) for name in FLAGS}
        flags["special"] = flags.get("special", False) or token.is_special
        flags.setdefault("normalized", not flags["special"])
        changed.append(LibraryToken(token.text, **flags))
    if changed:
        tokenizer.add_tokens(changed)


def open_tokenizers(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokenizerError(f"{path} needs tokenizers: pip install flambeau[llm]") from error
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def decoder_steps(decoder: Mapping[str, Any] | None) -> list[str] | None:
    """The steps of a decoder that gives each token bytes of its own; None for other decoders."""
    if decoder is None:
        return None
    if decoder["type"] == "Metaspace" and decoder.get("replacement") == SPACE:
        return ["Replace"] if decoder.get("prepend_scheme") == "never" else ["Replace", "Strip"]
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    known = all(
        step["type"] in ("ByteLevel", "ByteFallback", "Fuse")
        or (step["type"] == "Replace" and step["pattern"] == {"String": SPACE} and step["content"] == " ")
        or (step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0))
        for step in steps
    )
    names = [step["type"] for step in steps if step["type"] != "Fuse"]
    return names if known and (names == ["ByteLevel"] or names[:1] == ["Replace"]) else None


def byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level tokens: printable bytes map to themselves, others to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF_CHARACTER = byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()
