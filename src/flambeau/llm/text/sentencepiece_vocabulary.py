"""SentencePieceVocabulary: a SentencePiece `.model` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.llm.errors import TokenizerError
from flambeau.llm.text.detokenizer import LeadingSpaces
from flambeau.llm.text.tokenizer_files import AddedToken
from flambeau.llm.text.vocabulary import SPACE, check_unicode


class SentencePieceVocabulary:
    """A SentencePiece `.model`. Text never produces a control piece such as "<s>"; only its id does."""

    has_bytes = True
    finds_special = False

    def __init__(self, path: Path, added: Mapping[str, AddedToken], add_bos: bool = True) -> None:
        self._processor = p = open_sentencepiece(path)
        self._pieces = p.vocab_size()
        added = {text: token for text, token in added.items() if token.token_id >= self._pieces}
        self._added = {token.token_id: text for text, token in added.items()}
        self.size = max(self._pieces, *self._added, -1) + 1 if self._added else self._pieces
        self.bos_id = p.bos_id() if p.bos_id() >= 0 else None
        self.eos_id = p.eos_id() if p.eos_id() >= 0 else None
        self._add_bos = add_bos and self.bos_id is not None
        controls = {p.id_to_piece(i): i for i in range(self._pieces) if p.is_control(i)}
        special = {text: token.token_id for text, token in added.items() if token.is_special}
        self.special_ids: Mapping[str, int] = controls | special
        self.named_ids: Mapping[str, int] = controls | {text: token.token_id for text, token in added.items()}
        self.leading_spaces: LeadingSpaces = dropped_spaces(p)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text, with BOS before them."""
        begin = [self.bos_id] if add_special and self._add_bos and self.bos_id is not None else []
        return begin + self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
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


def open_sentencepiece(path: Path) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise TokenizerError(f"{path} needs sentencepiece: pip install flambeau[llm]") from error
    try:
        return SentencePieceProcessor(model_proto=path.read_bytes())
    except Exception as error:  # the library raises several kinds of exceptions
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from error


def dropped_spaces(processor: Any) -> LeadingSpaces:
    """What a model does with leading spaces, found by decoding some."""
    starts = (i for i in range(processor.vocab_size()) if processor.id_to_piece(i).startswith(SPACE))
    first = next(starts, None)
    if first is None or processor.decode([first]).startswith(" "):
        return "keep"
    space = processor.piece_to_id(SPACE)
    return "drop one" if processor.decode([space, space]) == " " else "drop all"
