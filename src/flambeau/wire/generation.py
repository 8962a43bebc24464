"""Generate and Piece: the bodies of jobs of kind `generate`, and of the parts of their replies.

The front end knows the shape of an API; the worker knows tokenizers and chat templates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, DecodeError, Struct, UnsetType, ValidationError, defstruct, field, msgpack

from flambeau.llm.sampling_params import SAMPLING_FIELDS

ToolChoice = Literal["auto", "required"]
MediaKind = Literal["image", "video", "sound"]
EXAMPLES: dict[MediaKind, str] = {  # of data URLs, for messages
    "image": "data:image/png;base64,…",
    "video": "data:video/mp4;base64,…",
    "sound": "data:audio/wav;base64,…",
}

_TYPES: dict[str, Any] = {
    "integer": int,
    "number": float,
    "flag": bool,
    "texts": list[str],
    "token_ids": list[int],
    "biases": dict[int, float],
    "structure": dict[str, Any],
}

if TYPE_CHECKING:

    class SamplingOptions(Struct):
        """The sampling parameters that a request gives, by the names of SamplingParams."""

        def __init__(self, **given: Any) -> None: ...

else:
    SamplingOptions = defstruct(
        "SamplingOptions",
        [(name, _TYPES[known.kind] | UnsetType, UNSET) for name, known in SAMPLING_FIELDS.items()],
        kw_only=True,
        frozen=True,
        omit_defaults=True,
        forbid_unknown_fields=True,
        module=__name__,
    )


class Adapter(Struct, array_like=True, frozen=True):
    """An adapter that requests name. A worker that does not have it yet loads it from its path."""

    name: str
    path: str = ""  # empty: the model's own settings have it
    serial: int = 0  # tells it from others that had the same name

    @property
    def key(self) -> str:
        """Its name in a worker."""
        return f"{self.name}#{self.serial}" if self.serial else self.name


class AdapterChange(Struct, array_like=True, frozen=True):
    """The body of a job of kind `adapter`: load it, or unload it."""

    adapter: Adapter
    loads: bool


class MediaInput(Struct, array_like=True, frozen=True):
    """An image, a video or a sound in the messages of a chat; they have a part of its type in its place."""

    name: str  # its place in the client's request
    url: str = ""  # a data URL, or the address that the server has fetched it from
    data: bytes = b""  # the file, if the server has fetched it
    kind: MediaKind = "image"

    @property
    def what(self) -> str:
        """Its kind with an article, for messages."""
        return f"{'an' if self.kind == 'image' else 'a'} {self.kind}"


class Generate(Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A request: prompts as text or token ids, or the messages of a chat; and how to sample."""

    prompts: list[str | list[int]] = []
    messages: list[dict[str, Any]] | None = None
    files: list[MediaInput] = []  # of the messages, in their order
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""  # with the choice "required": the one tool that must be called; empty: any
    parallel_tool_calls: bool = True  # whether one answer may call several tools
    reasoning_effort: str | None = None
    max_reasoning_tokens: int | None = None
    template_options: dict[str, Any] = {}  # further variables of the chat template
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stream: bool = False  # pieces as they are made; otherwise one for each choice, whole
    echo: bool = False  # the prompt before the text
    add_special: bool = True  # begin prompts that are text with the tokenizer's special tokens
    truncate: int | None = None  # keep so many of a prompt's last tokens; -1: as many as there is room for
    cache_salt: str = ""  # only requests with the same one share the prefix cache
    returns_ids: bool = False  # the ids of prompts and generated tokens are part of the reply
    suffix: str = ""  # the text behind the one that is generated; for models with the ability `infill`
    adapter: Adapter | None = None  # the adapter of the model that generates


class Token(Struct, array_like=True, frozen=True):
    """A token with its log-probability and the likeliest alternatives."""

    id: int
    text: str
    logprob: float | None  # None: the first token of a prompt, which nothing precedes
    data: bytes = b""  # its bytes, which may be part of a character
    top: list[tuple[int, str, float, bytes]] = []
    rank: int = 0  # among all tokens, from 1; 0: not counted


class CallPiece(Struct, array_like=True, frozen=True):
    """A piece of a tool call: the first one of a call has its name, the others continue its arguments."""

    index: int  # which of the choice's calls
    name: str = ""
    arguments: str = ""  # JSON text; the arguments of a call are those of its pieces together


class Piece(Struct, omit_defaults=True, frozen=True):
    """The next piece of one choice: prompt i of n choices has the indices i·n to i·n+n-1.

    In a chat, `text` is the answer alone; what the model thinks and which tools it calls are separate. They follow each
    other in the order reasoning, text, calls.
    """

    index: int
    text: str
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"; the last piece of a choice has one
    tokens: list[Token] | None = None  # with log-probabilities, if the request asks for them
    num_prompt_tokens: int = 0  # the counts are in the last piece of a choice
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_reasoning_tokens: int = 0
    reasoning: str = ""
    calls: list[CallPiece] = []
    stop: str = ""  # the stop string that ended the text; empty: none did
    num_sound_tokens: int = 0  # of those of the prompt
    prompt_tokens: list[Token] | None = None  # with log-probabilities, if the request asks for them
    token_ids: list[int] | None = None  # those generated, if the request asks for them
    prompt_ids: list[int] | None = None  # in the first piece of a choice, if the request asks for them


_encode = msgpack.Encoder().encode
_decode_request = msgpack.Decoder(Generate).decode
_decode_change = msgpack.Decoder(AdapterChange).decode
_decode_pieces = msgpack.Decoder(list[Piece]).decode


def given_options(options: SamplingOptions) -> dict[str, Any]:
    """The parameters that a request gives; the model's settings decide the others."""
    return {name: value for name in SAMPLING_FIELDS if (value := getattr(options, name)) is not UNSET}


def encode_request(request: Generate) -> bytes:
    return _encode(request)


def decode_request(body: bytes | bytearray) -> Generate:
    """Raises ValueError for a body that is not a request."""
    try:
        return _decode_request(body)
    except (ValidationError, DecodeError, RecursionError) as error:
        raise ValueError(f"the body is not a generation request: {error}") from None


def encode_adapter_change(change: AdapterChange) -> bytes:
    return _encode(change)


def decode_adapter_change(body: bytes | bytearray) -> AdapterChange:
    """Raises ValueError for a body that is not one."""
    try:
        return _decode_change(body)
    except (ValidationError, DecodeError) as error:
        raise ValueError(f"the body is not a change of adapters: {error}") from None


def encode_pieces(pieces: list[Piece]) -> bytes:
    """The body of one part: what one step generated for a job."""
    return _encode(pieces)


def decode_pieces(body: bytes) -> list[Piece]:
    return _decode_pieces(body)
