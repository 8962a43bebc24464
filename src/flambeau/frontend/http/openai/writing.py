"""Writer: the pieces of a generation → the document of a reply, or the events of a stream."""

from __future__ import annotations

import random
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flambeau import __version__
from flambeau.frontend.http.openai.usage import Usage
from flambeau.serving.model import Model
from flambeau.wire.generation import Piece, Token

encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct, frozen=True):
    """What every document of one reply begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: Model, name: str | None) -> Head:
        """The head of a new reply; the model is called what the client called it."""
        reply_id = f"{prefix}{random.getrandbits(128):032x}"  # distinct, not secret
        return cls(reply_id, int(time.time()), name or model.name, fingerprint(model))


def fingerprint(model: Model) -> str:
    """Changes with what could make the same seed give another text: this software, or the model."""
    made_of = f"{__version__} {model.name} {model.version} {model.source.url}"
    return f"fp_{zlib.crc32(made_of.encode('utf-8', 'backslashreplace')):08x}"


@dataclass(slots=True)
class Choice:
    """One choice of a whole reply, as its pieces make it."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.texts)


class Writer(ABC):
    """Knows the shape of an endpoint's replies."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: Head, num_choices: int, *, has_logprobs: bool, has_usage: bool) -> None:
        self._head = msgspec.to_builtins(head)
        self._usage = Usage(num_choices)
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage
        start = encode({"object": self.chunk_object, **self._head})
        self._start = b"data: " + start[:-1] + b',"choices":['  # of every event, ready to be sent
        self._end = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """What is shown of a choice, but for its index."""

    @abstractmethod
    def events(self, piece: Piece) -> bytes:
        """The events of a stream that a piece makes; maybe none."""

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """The document of a reply, from all its pieces."""
        found: dict[int, Choice] = {}
        for piece in pieces:
            choice = found.setdefault(piece.index, Choice())
            choice.texts.append(piece.text)
            choice.tokens += piece.tokens or ()
            if piece.finish_reason is not None:
                choice.finish_reason = piece.finish_reason
                self._usage.add(piece)
        choices = [{"index": index, **self.choice(choice)} for index, choice in sorted(found.items())]
        document = {"object": self.whole_object, **self._head, "choices": choices, "usage": self._usage.document()}
        return encode(document)

    def last_events(self) -> bytes:
        """What comes after the last piece: what it all has cost, where the client wants to know."""
        if not self._has_usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._start, encode(self._usage.document()))
