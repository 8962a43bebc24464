"""Tokenize and Detokenize: the bodies of jobs of kind `tokenize`, and their replies."""

from __future__ import annotations

from typing import Any

from msgspec import DecodeError, Struct, ValidationError, msgpack

from flambeau.wire.generation import MediaInput


class Tokenize(Struct, tag="tokenize", omit_defaults=True, frozen=True, kw_only=True):
    """A prompt, or the messages of a chat, to turn into token ids."""

    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    files: list[MediaInput] = []  # of the messages, in their order
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # further variables of the chat template
    add_special: bool = True  # the tokens that begin every sequence; a chat template writes its own
    has_texts: bool = False  # the reply has the text of each token


class Detokenize(Struct, tag="detokenize", frozen=True, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[int]


class Tokenized(Struct, frozen=True, kw_only=True):
    """The reply to Tokenize."""

    tokens: list[int]
    texts: list[str] | None
    max_length: int  # tokens of a prompt and its completion


class Detokenized(Struct, frozen=True, kw_only=True):
    """The reply to Detokenize."""

    text: str


_encode = msgpack.Encoder().encode
_request_decoder: msgpack.Decoder[Tokenize | Detokenize] = msgpack.Decoder(Tokenize | Detokenize)
_decode_tokenized = msgpack.Decoder(Tokenized).decode
_decode_detokenized = msgpack.Decoder(Detokenized).decode


def encode_tokenize(request: Tokenize | Detokenize) -> bytes:
    return _encode(request)


def decode_tokenize(body: bytes | bytearray) -> Tokenize | Detokenize:
    """Raises ValueError for a body that is not a request."""
    try:
        return _request_decoder.decode(body)
    except (ValidationError, DecodeError, RecursionError) as error:
        raise ValueError(f"the body is not a request to tokenize: {error}") from None


def encode_reply(reply: Tokenized | Detokenized) -> bytes:
    return _encode(reply)


def decode_tokenized(body: bytes) -> Tokenized:
    return _decode_tokenized(body)


def decode_detokenized(body: bytes) -> Detokenized:
    return _decode_detokenized(body)
