"""Infill: the prompt for a text between a prefix and a suffix, in the tokens of a model's family."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

ANCHOR = "\u263a"  # before a suffix, so that its first word gets no space; its own tokens are removed


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillMarkers:
    """The tokens of a family, as its vocabulary spells them."""

    prefix: str
    suffix: str
    middle: str = ""  # after it the model writes; empty: after the prefix
    stops: Sequence[str] = ()  # tokens that end the text besides the model's own
    has_suffix_first: bool = False
    joins_suffix: bool = False  # the suffix begins without the space that SentencePiece adds to a text


FAMILIES = (
    InfillMarkers(  # Qwen2.5-Coder, CodeGemma, Granite
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        stops=("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    InfillMarkers(  # StarCoder and StarCoder2, Granite Code
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        stops=("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>"),
    ),
    InfillMarkers(  # CodeLlama
        prefix="\u2581<PRE>",
        suffix="\u2581<SUF>",
        middle="\u2581<MID>",
        stops=("\u2581<EOT>",),
        joins_suffix=True,
    ),
    InfillMarkers(  # DeepSeek-Coder
        prefix="<\uff5cfim\u2581begin\uff5c>", suffix="<\uff5cfim\u2581hole\uff5c>", middle="<\uff5cfim\u2581end\uff5c>"
    ),
    InfillMarkers(prefix="[PREFIX]", suffix="[SUFFIX]", has_suffix_first=True),  # Codestral
)


class InfillVocabulary(Protocol):
    """The part of a vocabulary that fills in."""

    def encode(self, text: str, *, add_special: bool) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]: ...

    def piece_id(self, piece: str) -> int | None: ...


class Infill:
    """Writes prompts with the markers of one family. The texts between them are plain: they hold no markers."""

    def __init__(self, vocabulary: InfillVocabulary, markers: InfillMarkers) -> None:
        self._vocabulary = vocabulary
        self._markers = markers
        names = [name for name in (markers.prefix, markers.suffix, markers.middle, *markers.stops) if name]
        self._ids = {name: token for name in names if (token := vocabulary.piece_id(name)) is not None}
        self._pattern = re.compile("|".join(map(re.escape, self._ids)))
        self.stop_ids = tuple(self._ids[name] for name in markers.stops if name in self._ids)

    def encode(self, prefix: str, suffix: str) -> list[int]:
        """The prompt after which the model writes the text between the two."""
        markers, ids = self._markers, self._ids
        before = [ids[markers.prefix], *self._plain(prefix)]
        after = [ids[markers.suffix], *(self._joined(suffix) if markers.joins_suffix else self._plain(suffix))]
        begin = self._vocabulary.encode("", add_special=True)  # BOS, if the model has one
        parts = [*after, *before] if markers.has_suffix_first else [*before, *after]
        return [*begin, *parts, *([ids[markers.middle]] if markers.middle else [])]

    def _plain(self, text: str) -> list[int]:
        """The ids of a text; a marker in it is broken up, since a vocabulary may find it in any text."""
        cuts = [0, *(found.start() + 1 for found in self._pattern.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts) if end > start]
        return [token for part in parts for token in self._vocabulary.encode_plain(part)]

    def _joined(self, text: str) -> list[int]:
        anchor, whole = self._plain(ANCHOR), self._plain(ANCHOR + text)
        return whole[len(anchor) :] if whole[: len(anchor)] == anchor else self._plain(text)


def find_infill(vocabulary: InfillVocabulary) -> Infill | None:
    """The family whose markers a vocabulary has; None: the model cannot fill in."""
    for markers in FAMILIES:
        names = filter(None, (markers.prefix, markers.suffix, markers.middle))
        if all(vocabulary.piece_id(name) is not None for name in names):
            return Infill(vocabulary, markers)
    return None
