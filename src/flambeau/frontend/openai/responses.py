"""Responses of generations: GenerationReply sends them, a ReplyWriter gives them their shape."""

from __future__ import annotations

import random
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from flambeau import __version__
from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, FlambeauError, InvalidInput, JobFailed, ReplyNotRead
from flambeau.frontend.http.errors import JSON_TYPE, message_of, openai_error_body, openai_status, status_and_type
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.openai.chat_files import check_reads, fetch_files, is_remote
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, Piece, Token, decode_pieces, encode_request, given_options
from flambeau.wire.messages import Part

# The second header stops nginx from buffering the stream.
EVENT_STREAM: Sequence[Header] = (("content-type", "text/event-stream; charset=utf-8"), ("x-accel-buffering", "no"))
DONE = b"data: [DONE]\n\n"
BYTES_PER_TOKEN = 4  # of a usual prompt
FILE_TOKENS = 256  # assumed for a file of any kind
UNLIMITED_TOKENS = 256  # assumed for a reply without a limit
LEAST_LOGPROB = -9999.0  # JSON has no infinity

encode = msgspec.json.Encoder().encode
TokenName = Callable[[int, str], str]  # id and text → the name of a token in log-probabilities


class ResponseHead(msgspec.Struct, frozen=True):
    """The fields that every document of one response begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: Model, name: str | None) -> ResponseHead:
        """The head of a new response, with the name that the client used for the model."""
        reply_id = f"{prefix}{random.getrandbits(128):032x}"  # unique, not secret
        return cls(reply_id, int(time.time()), name or model.name, fingerprint(model))


def fingerprint(model: Model) -> str:
    """A hash of the software and model versions: with the same one, the same seed gives the same text."""
    made_of = f"{__version__} {model.name} {model.version} {model.source.url}"
    return f"fp_{zlib.crc32(made_of.encode('utf-8', 'backslashreplace')):08x}"


@dataclass(slots=True)
class ToolCall:
    """One call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ResponseChoice:
    """One choice of a whole response, collected from its pieces: what the model thought, answered and calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: list[Token] | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    num_tokens: int = 0

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        for call in piece.calls:
            if call.index == len(self.calls):
                self.calls.append(ToolCall(new_call_id(), call.name))
            self.calls[call.index].arguments += call.arguments
        self.tokens += piece.tokens or ()
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.num_tokens += piece.num_tokens
        self.prompt_tokens = piece.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens
        self.prompt_ids = piece.prompt_ids if self.prompt_ids is None else self.prompt_ids
        if piece.token_ids is not None:
            self.token_ids = [*(self.token_ids or ()), *piece.token_ids]


def new_call_id() -> str:
    """The id of a tool call: distinct, not secret."""
    return f"call_{random.getrandbits(96):024x}"


class ReplyWriter(Protocol):
    """Pieces of a generation → the document of a response, or the events of a stream, in the format of one API."""

    end: bytes  # after the last event
    names: Mapping[str, str]  # of fields in a worker's errors → those of the client

    @property
    def model(self) -> str:
        """The name that the client used for the model."""

    def whole(self, pieces: Sequence[Piece]) -> bytes: ...

    def events(self, piece: Piece) -> bytes:
        """The events of a piece; may be empty."""

    def last_events(self) -> bytes:
        """The events after the last piece."""

    def explanation(self, document: bytes) -> bytes:
        """The event with an explanation of where the time went."""

    def error(self, status: int, message: str, error: FlambeauError, cause: str) -> bytes:
        """The event that ends a failed stream."""

    def usage_attributes(self) -> dict[str, Any]:
        """The finished response in OpenTelemetry's conventions."""


class ResponseWriter(ABC):
    """Writes the formats that OpenAI's chat and completions share."""

    end = DONE
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        head: ResponseHead,
        num_choices: int,
        *,
        has_logprobs: bool,
        has_usage: bool,
        names: Mapping[str, str] | None = None,
        shows_ids: bool = False,
    ) -> None:
        self.names: Mapping[str, str] = names or {}
        self._head = msgspec.to_builtins(head)
        self._usage = TokenUsage(num_choices)
        self._has_logprobs = has_logprobs
        self._name: TokenName = id_name if shows_ids else own_name  # of tokens in log-probabilities
        self._has_usage = has_usage
        start = encode({"object": self.chunk_object, **self._head})
        self._start = b"data: " + start[:-1] + b',"choices":['  # of every event
        self._end = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    @property
    def model(self) -> str:
        """The name that the client used for the model."""
        return str(self._head["model"])

    @abstractmethod
    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        """The document of a choice, without its index."""

    @abstractmethod
    def events(self, piece: Piece) -> bytes:
        """The events of a piece; may be empty."""

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        found: dict[int, ResponseChoice] = {}
        for piece in pieces:
            choice = found.setdefault(piece.index, ResponseChoice())
            choice.add(piece)
            if piece.finish_reason is not None:
                self._usage.add(piece)
        choices = [{"index": index, **self.choice(choice)} for index, choice in self.chosen(found)]
        document = {"object": self.whole_object, **self._head, "choices": choices, "usage": self._usage.document()}
        shared = self.shared(found[0]) if 0 in found else {}
        return encode(document | shared) + b"\n"

    def chosen(self, found: Mapping[int, ResponseChoice]) -> Sequence[tuple[int, ResponseChoice]]:
        """The choices of a whole response, and their places in it."""
        return sorted(found.items())

    def shared(self, first: ResponseChoice) -> dict[str, Any]:
        """What a whole response has beside its choices."""
        return {}

    def usage_attributes(self) -> dict[str, Any]:
        """The finished response in OpenTelemetry's conventions."""
        usage = self._usage
        return {
            "gen_ai.response.id": self._head["id"],
            "gen_ai.response.model": self._head["model"],
            "gen_ai.response.finish_reasons": tuple(usage.finish_reasons),
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.output_tokens": usage.completion,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
        }

    def last_events(self) -> bytes:
        """The events after the last piece: the token usage, if the request asks for it."""
        if not self._has_usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._start, encode(self._usage.document()))

    def explanation(self, document: bytes) -> bytes:
        """Where the time of the request went, as an event without choices, which clients know from token usage."""
        return b'%b],"usage":null,"flambeau_explain":%b}\n\n' % (self._start, document)

    def error(self, status: int, message: str, error: FlambeauError, cause: str) -> bytes:
        return b"data: %b\n" % openai_error_body(status, message, error, cause)


class TokenUsage:
    """Sums the token counts in the last pieces of choices; a prompt with several choices counts once."""

    __slots__ = (
        "_num_choices",
        "accepted",
        "cached",
        "completion",
        "drafted",
        "finish_reasons",
        "prompt",
        "reasoning",
        "sounds",
    )

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices  # of each prompt
        self.prompt = self.completion = self.reasoning = self.cached = self.drafted = self.accepted = self.sounds = 0
        self.finish_reasons: list[str] = []

    def add(self, piece: Piece) -> None:
        """Add the last piece of a choice."""
        if piece.index % self._num_choices == 0:
            self.prompt += piece.num_prompt_tokens
            self.cached += piece.num_cached_tokens
            self.sounds += piece.num_sound_tokens
        self.completion += piece.num_tokens
        self.reasoning += piece.num_reasoning_tokens
        self.finish_reasons.append(piece.finish_reason or "")
        self.drafted += piece.num_drafted
        self.accepted += piece.num_accepted

    def document(self) -> dict[str, Any]:
        """The `usage` object; tokens drafted by speculation are counted as predictions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "audio_tokens": self.sounds},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
                "reasoning_tokens": self.reasoning,
                "audio_tokens": 0,
            },
        }


def own_name(token_id: int, text: str) -> str:
    return text


def id_name(token_id: int, text: str) -> str:
    return f"token_id:{token_id}"


def members(fields: Mapping[str, Any]) -> bytes:
    """These fields as the end of an object that has others."""
    return b"," + encode(fields)[1:-1] if fields else b""


def prompt_fields(choice: ResponseChoice) -> dict[str, Any]:
    """The log-probabilities of the prompt in vLLM's form, if they are asked for: by token, and nothing of the first."""
    if choice.prompt_tokens is None:
        return {}
    return {"prompt_logprobs": [_prompt_entry(token) for token in choice.prompt_tokens]}


def _prompt_entry(token: Token) -> dict[str, Any] | None:
    if token.logprob is None:
        return None
    own = {str(token.id): _scored(token.logprob, token.rank, token.text)}
    others = {
        str(token_id): _scored(logprob, rank, text) for rank, (token_id, text, logprob, _) in enumerate(token.top, 1)
    }
    return own | {token_id: entry for token_id, entry in others.items() if token_id not in own}


def _scored(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


def finite(logprob: float | None) -> float:
    """A log-probability that JSON can represent."""
    return logprob if logprob is not None and logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN


class GenerationReply(Prediction):
    """Writes the pieces of a generation to its exchange, as a whole response or as a stream."""

    __slots__ = ("_is_streamed", "_pieces", "_writer")

    def __init__(
        self, exchange: Exchange, model: Model, style: ErrorStyle, writer: ReplyWriter, *, is_streamed: bool
    ) -> None:
        super().__init__(exchange, model, style)
        self._writer = writer
        self._is_streamed = is_streamed
        self._pieces: list[Piece] = []

    def on_parts(self, parts: list[Part]) -> None:
        if parts[0].status >= 400:  # an error of the handler; its further parts are dropped
            if self.exchange.on_gone is not None:
                self.exchange.on_gone()
            self.on_error(JobFailed(parts[0].body.decode("utf-8", "replace"), status=parts[0].status))
        elif self._is_streamed:
            self._stream(parts)
        else:
            for part in parts:
                self._keep(part)

    def _keep(self, part: Part) -> None:
        if part.body:
            self._pieces += decode_pieces(part.body)
        if part.last:
            body = self._writer.whole(self._pieces)
            self._note_usage()
            self.model.answers[200] += 1
            self.exchange.respond(200, body, (JSON_TYPE,))

    def _stream(self, parts: list[Part]) -> None:
        events = self._writer.events
        chunks = [events(piece) for part in parts if part.body for piece in decode_pieces(part.body)]
        ends = parts[-1].last
        if ends:
            chunks.append(self._writer.last_events())
            if explanation := self.exchange.take_explanation():
                chunks.append(self._writer.explanation(explanation))
            chunks.append(self._writer.end)
            self._note_usage()
        exchange = self.exchange
        if not exchange.is_started:
            self.model.answers[200] += 1
            exchange.start(200, EVENT_STREAM, has_trailer=False)
        exchange.send((b"".join(chunks),), ends=ends)

    def _note_usage(self) -> None:
        if self.exchange.trace is not None:
            self.exchange.trace.work |= self._writer.usage_attributes()

    def on_error(self, error: FlambeauError) -> None:
        """Respond with the error; a stream that has started ends with an error event."""
        if isinstance(error, InvalidInput) and (name := self._writer.names.get(error.field)) is not None:
            error.args = (str(error).replace(error.field, name),)
            error.field = name
        if not (self._is_streamed and self.exchange.is_started) or isinstance(error, ReplyNotRead):
            super().on_error(error)
            return
        self.log(error)
        self.exchange.note_error(error)
        status, message, cause = described(error, self.style)
        self.model.count_broken(status)
        self.exchange.send((self._writer.error(status, message, error, cause),), ends=True)


def described(error: FlambeauError, style: ErrorStyle) -> tuple[int, str, str]:
    """The status, message and cause of an error that ends a stream."""
    plain = replace(style, is_plain=True)
    status = openai_status(error, status_and_type(error, plain)[0])
    return status, message_of(error, plain), error.cause if style.has_details else ""


Work = Coroutine[Any, Any, None] | None


def generate(
    server: Server,
    exchange: Exchange,
    model: Model,
    version: str | None,
    request: Generate,
    writer: ReplyWriter,
) -> Work:
    """Submit a generation request to its model as a job; later, if files are fetched first."""
    check_reads(model, request.files)
    if any(map(is_remote, request.files)):
        return fetch_and_generate(server, exchange, model, version, request, writer)
    submit_generation(exchange, model, version, request, writer, server.config.error_style)
    return None


async def fetch_and_generate(
    server: Server,
    exchange: Exchange,
    model: Model,
    version: str | None,
    request: Generate,
    writer: ReplyWriter,
) -> None:
    files = await fetch_files(request.files, server.file_downloaders)
    request = msgspec.structs.replace(request, files=files)
    submit_generation(exchange, model, version, request, writer, server.config.error_style)


def submit_generation(
    exchange: Exchange,
    model: Model,
    version: str | None,
    request: Generate,
    writer: ReplyWriter,
    style: ErrorStyle,
) -> None:
    if exchange.trace is not None:
        exchange.trace.work |= generation_attributes(request, writer)
    reply = GenerationReply(exchange, model, style, writer, is_streamed=request.stream)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=exchange.headers,
        body=RequestBody(encoded(request)),
        arrived=exchange.arrived,
        kind="generate",
    )
    job.estimated_tokens = estimated_tokens(request, job.body.size_bytes)
    submit(reply, job, version)


def estimated_tokens(request: Generate, size_bytes: int) -> int:
    """About how many tokens a request needs, for the limits of its key; what it has used is counted at its end."""
    given = given_options(request.sampling)
    num_choices: int = given.get("n", 1) * max(1, len(request.prompts))
    most: int = given.get("max_tokens", UNLIMITED_TOKENS)
    file_bytes = sum(len(file.url) + len(file.data) for file in request.files)
    num_read = max(0, size_bytes - file_bytes) // BYTES_PER_TOKEN + FILE_TOKENS * len(request.files)
    return num_read + most * num_choices


SAMPLING_ATTRIBUTES = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


def generation_attributes(request: Generate, writer: ReplyWriter) -> dict[str, Any]:
    """A request in OpenTelemetry's conventions for generative models; prompts and texts are not recorded."""
    given = given_options(request.sampling)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if request.messages is not None else "text_completion",
        "gen_ai.provider.name": "flambeau",
        "gen_ai.request.model": writer.model,
        "gen_ai.request.stream": request.stream,
    }
    for name in SAMPLING_ATTRIBUTES:
        if given.get(name) is not None:
            attributes[f"gen_ai.request.{name}"] = given[name]
    if stops := given.get("stop"):
        attributes["gen_ai.request.stop_sequences"] = tuple(stops)
    if given.get("n", 1) != 1:
        attributes["gen_ai.request.choice.count"] = given["n"]
    return attributes


def encoded(request: Generate) -> bytes:
    try:
        return encode_request(request)
    except OverflowError:  # in a tool or a template variable; the other fields have limits
        raise BadRequest("a number in the request has more than 64 bits") from None
