"""What a front end asks of a model that generates text, and the pieces it gets: the body of jobs of kind `generate`.

The front end knows an API's shape, the worker knows tokenizers and chat templates; this is what lies between.
"""

from __future__ import annotations

from typing import Any

from msgspec import DecodeError, Struct, ValidationError, msgpack


class Generate(Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A request: prompts as text or token ids, or the messages of a chat; and how to sample."""

    prompts: list[str | list[int]] = []
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}  # further variables of the chat template
    sampling: dict[str, Any] = {}  # fields of SamplingParams, by name
    stream: bool = False  # pieces as they are made; otherwise one for each choice, whole
    echo: bool = False  # the prompt before the text


class Token(Struct, array_like=True, frozen=True):
    """A token and its log-probability, with the likeliest alternatives."""

    id: int
    text: str
    logprob: float
    data: bytes = b""  # the bytes it stands for, which may be no text of their own
    top: list[tuple[int, str, float, bytes]] = []


class Piece(Struct, array_like=True, frozen=True):
    """The next piece of one choice: prompt i of n choices has the indices i·n to i·n+n-1."""

    index: int
    text: str
    finish_reason: str | None = None  # "stop" or "length"; the last piece of a choice has one
    tokens: list[Token] | None = None  # where log-probabilities were asked for
    num_prompt_tokens: int = 0  # these counts are in the last piece of a choice …
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Pieces(Struct, array_like=True, frozen=True):
    """The body of one part: what one step has made for a job."""

    pieces: list[Piece]


_encode = msgpack.Encoder().encode
_decode_request = msgpack.Decoder(Generate).decode
_decode_pieces = msgpack.Decoder(Pieces).decode


def encode_request(request: Generate) -> bytes:
    """The body of a job of kind `generate`."""
    return _encode(request)


def decode_request(body: bytes | bytearray) -> Generate:
    """The request behind such a body; raises ValueError where it is none."""
    try:
        return _decode_request(body)
    except (ValidationError, DecodeError, RecursionError) as error:
        raise ValueError(f"this is no request to generate: {error}") from None


def encode_pieces(pieces: list[Piece]) -> bytes:
    """The body of a part of the reply."""
    return _encode(Pieces(pieces))


def decode_pieces(body: bytes) -> list[Piece]:
    """What a part of the reply holds."""
    return _decode_pieces(body).pieces
