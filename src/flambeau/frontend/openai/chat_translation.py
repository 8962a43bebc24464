"""Other APIs as chats: `read_chat` checks a request, ChatTranslation writes the reply from chunks of a ChatWriter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from flambeau.errors import FlambeauError, InvalidField
from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.requests import ChatRequest, read_object
from flambeau.frontend.openai.responses import encode
from flambeau.wire.generation import Piece

Document = dict[str, Any]
EVENT_START = b"data: "

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def read_chat(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """A chat of the fields that are not None; errors have the client's `names` of them."""
    with client_names(names):
        return read_object({name: value for name, value in fields.items() if value is not None}, ChatRequest)


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Raise the errors of a chat in the names of the client; `names` has them by those of a chat."""
    try:
        yield
    except InvalidField as error:
        name = names.get(error.field)
        if name is None:
            raise
        raise InvalidField(name, str(error).replace(error.field, name)) from None


class ChatTranslation(ABC):
    """A ReplyWriter for an API whose requests become chats: one choice, with its token usage at the end."""

    end = b""
    names: Mapping[str, str] = {}

    def __init__(self, chat: ChatWriter) -> None:
        self._chat = chat
        self._stop = ""  # the stop string that ended the text

    @property
    def model(self) -> str:
        """The name that the client used for the model."""
        return self._chat.model

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        for piece in pieces:
            self._stop = piece.stop or self._stop
        return encode(self.document(_decode(self._chat.whole(pieces)))) + b"\n"

    def events(self, piece: Piece) -> bytes:
        self._stop = piece.stop or self._stop
        chunks = chunks_of(self._chat.events(piece))
        return b"".join(to_event(event) for chunk in chunks for event in self.on_chunk(chunk))

    def last_events(self) -> bytes:
        usage: Document = {}
        for chunk in chunks_of(self._chat.last_events()):
            usage = chunk.get("usage") or usage
        return b"".join(map(to_event, self.on_end(usage)))

    def explanation(self, document: bytes) -> bytes:
        return b'event: flambeau_explain\ndata: {"type":"flambeau_explain","explanation":%b}\n\n' % document

    def usage_attributes(self) -> dict[str, Any]:
        return self._chat.usage_attributes()

    @abstractmethod
    def document(self, completion: Document) -> Document:
        """The whole reply, from a chat completion."""

    @abstractmethod
    def on_chunk(self, chunk: Document) -> Iterable[Document]:
        """The events of one chunk of a streamed chat."""

    @abstractmethod
    def on_end(self, usage: Document) -> Iterable[Document]:
        """The events after the last chunk."""

    @abstractmethod
    def error(self, status: int, message: str, error: FlambeauError, cause: str) -> bytes:
        """The event that ends a failed stream."""


def chunks_of(events: bytes) -> Iterator[Document]:
    """The documents of server-sent events as a ChatWriter writes them: one line each."""
    for event in events.split(b"\n\n"):
        if event.startswith(EVENT_START):
            yield _decode(event[len(EVENT_START) :])


def to_event(document: Document) -> bytes:
    """A server-sent event, named by the type of its document."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), encode(document))
