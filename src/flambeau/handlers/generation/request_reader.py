"""RequestReader: a job's request → prompts in tokens, sampling parameters and the form of the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from msgspec import MsgspecError, Struct, msgpack

from flambeau.errors import BadRequest, InvalidField
from flambeau.handlers.generation.generate_request import (
    STRUCTURED,
    GenerateRequest,
    check_text,
    read_generate_request,
    with_defaults,
)
from flambeau.handlers.generation.reply_formats import (
    EventFormat,
    Finish,
    JsonFormat,
    PieceFormat,
    ReplyFormat,
    TextFormat,
)
from flambeau.llm.errors import LLMError
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import Generate, decode_request, given_options
from flambeau.wire.messages import header

MAX_CHOICES = 1024  # of one request: prompts times n
CHARACTERS_PER_TOKEN = 256  # a longer prompt cannot fit, so it is not tokenized


class PromptTokenizer(Protocol):
    """The part of a tokenizer that requests need."""

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """A request for the engine, and the reply that its output becomes."""

    prompts: list[list[int]]
    params: SamplingParams
    reply: ReplyFormat
    is_stream: bool
    prompt_name: str = "prompt"  # the field of the request that it comes from


def to_bad_request(error: Exception, prompt_name: str = "prompt") -> BadRequest:
    """The error of a request that the engine rejects, with the client's name of the field."""
    parameter = getattr(error, "parameter", "")
    name = {"prompt": prompt_name, STRUCTURED: "response_format"}.get(parameter, parameter)
    return InvalidField(name, str(error)) if name else BadRequest(str(error))


class RequestReader:
    """Reads predictions and generation requests; raises BadRequest for invalid ones."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        max_length: int,
        defaults: SamplingParams,
        has_own_limit: bool,
        streams: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._defaults = defaults
        # Without a limit in model-config.yaml, a generation request that has none may use the whole context.
        self._generate_defaults = defaults if has_own_limit else replace(defaults, max_tokens=None)
        self._streams = streams

    def read(self, row: Any, headers: Sequence[tuple[str, str]] = ()) -> GenerateRequest:
        return read_generate_request(
            row,
            self._defaults,
            streams=self._streams,
            accept=header(headers, "accept") or "",
            content_type=header(headers, "content-type") or "",
        )

    def encode(self, prompt: str | list[int], name: str = "prompt") -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise InvalidField(name, f"the {name} is empty; send at least one character")
        self._check_length(len(prompt), name)
        return self._tokenizer.encode(check_text(prompt, name))

    def _check_length(self, num_characters: int, name: str) -> None:
        if num_characters > self._max_length * CHARACTERS_PER_TOKEN:
            raise InvalidField(
                "messages" if name == "chat" else name,
                f"the {name} has {num_characters} characters, and the model's context only {self._max_length} tokens; "
                "send a shorter one",
            )

    def encode_request(self, request: GenerateRequest) -> list[int]:
        if request.messages is None:
            return self.encode(request.prompt)
        return self._encode_chat(request.messages, {})

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        contents = [message.get("content") for message in messages]
        self._check_length(sum(len(text) for text in contents if isinstance(text, str)), "chat")
        try:
            return self._tokenizer.encode_chat(messages, **options)
        except (LLMError, TypeError, RecursionError) as error:
            raise InvalidField("messages", f"the messages do not fit the model's chat template: {error}") from None

    def predict(
        self, request: GenerateRequest, ids: list[int], progress: ResumeState | None, finish: Finish | None = None
    ) -> Prompted:
        """A prediction with the prompt `ids`; with `finish` the reply is never a stream."""
        count = request.params.n
        is_stream = request.stream and finish is None
        if is_stream and count > 1 and not request.has_events:
            raise BadRequest("n must be 1 in a stream of text; accept text/event-stream for a stream of events")
        full_text = (not is_stream and request.messages is None) if request.full_text is None else request.full_text
        prompt = self._text_of(request.prompt, ids) if full_text else ""
        preamble = prompt if progress is None else ""
        reply: ReplyFormat
        if not is_stream:
            reply = JsonFormat(prompt, count, self._tokenizer, details=request.details, finish=finish)
        elif request.has_events:
            reply = EventFormat(self._tokenizer, num_choices=count, preamble=preamble)
        else:
            reply = TextFormat(preamble)
        return Prompted(prompts=[ids], params=request.params, reply=reply, is_stream=is_stream)

    def generate(self, body: bytes | bytearray, progress: ResumeState | None) -> Prompted:
        """A request of kind `generate`, from the front end."""
        try:
            request = decode_request(body)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        params = with_defaults(given_options(request.sampling), self._generate_defaults)
        count = params.n * (len(request.prompts) if request.messages is None else 1)
        if not 1 <= count <= MAX_CHOICES:
            raise InvalidField("n", f"prompts times n must be 1 to {MAX_CHOICES}, not {count}")
        prompts = self._prompts_of(request)
        preambles = {}
        if request.echo:
            texts = [self._text_of(p, ids) for p, ids in zip(request.prompts, prompts, strict=False)]
            begun = progress.tokens if progress is not None else {}
            preambles = {i: texts[i // params.n] for i in range(count) if i // params.n < len(texts) and i not in begun}
        reply = PieceFormat(self._tokenizer, stream=request.stream, num_choices=count, preambles=preambles)
        name = "prompt" if request.messages is None else "messages"
        return Prompted(prompts=prompts, params=params, reply=reply, is_stream=request.stream, prompt_name=name)

    def _prompts_of(self, request: Generate) -> list[list[int]]:
        if request.messages is None:
            return [self.encode(prompt) for prompt in request.prompts]
        if request.tools and not self._tokenizer.shows_tools:
            raise InvalidField("tools", "the model's chat template does not show tools to the model; leave tools out")
        tools = {"tools": request.tools} if request.tools else {}
        return [self._encode_chat(request.messages, {**request.template_options, **tools})]

    def _text_of(self, prompt: str | list[int], ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) and prompt else self._tokenizer.decode(ids)


class ResumeStep(Struct, array_like=True, frozen=True):
    """What one part adds: (choice, its tokens since the part before, whether the choice is finished)."""

    made: list[tuple[int, list[int], bool]]
    seed: int | None = None  # in the first part only


_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder(ResumeStep).decode


@dataclass(slots=True)
class ResumeState:
    """The tokens of each choice so far, the finished choices, and the seed they are sampled with."""

    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


def encode_step(made: dict[int, list[int]], finished: set[int], seed: int | None) -> bytes:
    return _encode(ResumeStep([(index, tokens, index in finished) for index, tokens in made.items()], seed))


def read_state(steps: Sequence[bytes]) -> ResumeState | None:
    """The sum of all steps; None if the first one is missing or one cannot be decoded."""
    try:
        decoded = [_decode(step) for step in steps]
    except MsgspecError:
        return None
    if not decoded or decoded[0].seed is None:
        return None
    state = ResumeState(decoded[0].seed)
    for step in decoded:
        for index, tokens, is_finished in step.made:
            state.tokens.setdefault(index, []).extend(tokens)
            if is_finished:
                state.finished.add(index)
    return state
