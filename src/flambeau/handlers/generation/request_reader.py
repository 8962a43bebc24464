"""RequestReader: a job's request → prompts in tokens, sampling parameters and the form of the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from msgspec import MsgspecError, Struct, msgpack

from flambeau.errors import BadRequest, InvalidField
from flambeau.handlers.generation.chat_files import NO_FILES, ChatFileReader, ChatFiles
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.chat_sounds import ChatSounds
from flambeau.handlers.generation.generate_request import (
    STRUCTURED,
    GenerateRequest,
    check_text,
    read_generate_request,
    with_defaults,
)
from flambeau.handlers.generation.media_files import media_kinds
from flambeau.handlers.generation.reply_formats import (
    EventFormat,
    Finish,
    JsonFormat,
    PieceFormat,
    ReplyFormat,
    TextFormat,
)
from flambeau.llm.chat.call_ids import with_named_ids, with_short_ids
from flambeau.llm.chat.chat_format import ChatFormat, ChatTurn
from flambeau.llm.chat.stream_parser import StreamParser
from flambeau.llm.core.sequence import IncrementalDetokenizer
from flambeau.llm.errors import LLMError
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.infill import Infill
from flambeau.wire.generation import Adapter, Generate, decode_request, given_options
from flambeau.wire.messages import header
from flambeau.wire.tokenization import Detokenize, Detokenized, Tokenized, decode_tokenize, encode_reply

MAX_CHOICES = 1024  # of one request: prompts times n
MAX_PROMPT_SCORES = 2_000_000  # log-probabilities of prompts in one reply: steps wait while they are written
# Tokens of reasoning where a chat template does not know the effort; None: no limit.
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 8192, "high": None, "xhigh": None}
CANNOT_INFILL = (
    "suffix is not supported by this model: its vocabulary has no tokens to fill in a text, as Qwen2.5-Coder, "
    "StarCoder2, CodeLlama, DeepSeek-Coder, Codestral and Granite have them; send the prompt alone"
)
NO_STREAM = "prompt_logprobs come with whole replies only; leave stream out"
ALL_THAT_FITS = -1  # a truncation to the model's context, the answer included
CHARACTERS_PER_TOKEN = 256  # a longer prompt cannot fit, so it is not tokenized


class PromptTokenizer(Protocol):
    """The part of a tokenizer that requests need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def special_id(self, text: str) -> int | None: ...

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str],
        include_stop: bool,
        skip_special: bool,
        marker_texts: Mapping[int, str],
    ) -> IncrementalDetokenizer: ...

    @property
    def template_text(self) -> str: ...

    @property
    def infill(self) -> Infill | None:
        """How the model fills in a text; None if it does not."""

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
    adapter: Adapter | None = None
    turn: ChatTurn | None = None  # of a chat from the front end
    prompt_name: str = "prompt"  # the field of the request that it comes from
    files: ChatFiles = NO_FILES  # of the only prompt, which has places for them
    cache_salt: str = ""


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
        chat_format: ChatFormat | None = None,
        images: ChatImages | None = None,
        sounds: ChatSounds | None = None,
    ) -> None:
        self._files = ChatFileReader(images, sounds, max_length)
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._defaults = defaults
        # Without a limit in model-config.yaml, a generation request that has none may use the whole context.
        self._generate_defaults = defaults if has_own_limit else replace(defaults, max_tokens=None)
        self._streams = streams
        self._format = chat_format or ChatFormat.of(tokenizer)

    def read(self, row: Any, headers: Sequence[tuple[str, str]] = ()) -> GenerateRequest:
        return read_generate_request(
            row,
            self._defaults,
            streams=self._streams,
            accept=header(headers, "accept") or "",
            content_type=header(headers, "content-type") or "",
        )

    def encode(self, prompt: str | list[int], name: str = "prompt", *, add_special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise InvalidField(name, f"the {name} is empty; send at least one character")
        self._check_length(len(prompt), name)
        return self._tokenizer.encode(check_text(prompt, name), add_special=add_special)

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
        if media_kinds(request.messages):
            raise InvalidField("messages", "predictions read text only; send files to /v1/chat/completions")
        return self._encode_chat(request.messages, {})

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        files: ChatFiles = NO_FILES,
    ) -> list[int]:
        contents = [message.get("content") for message in messages]
        self._check_length(sum(map(num_characters, contents)), "chat")
        expansions = self._files.expansions(messages, files)
        if not expansions:
            return self._encode_template(messages, options)
        ids = self._encode_template(messages, {**options, "expansions": expansions})
        if len(ids) >= self._max_length:  # before files are encoded, which takes long
            raise InvalidField(
                "messages",
                f"the prompt has {len(ids)} tokens, those of {files} included, and the model's context "
                f"{self._max_length}, the answer's included; send fewer or smaller ones, or less text",
            )
        return ids

    def _encode_template(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
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
        if is_stream and request.params.prompt_logprobs is not None:
            raise InvalidField("prompt_logprobs", NO_STREAM)
        check_scores("prompt_logprobs", request.params.prompt_logprobs, [ids], count)
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
        if (infill := self._infill(request.suffix)) is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *infill.stop_ids))
        count = params.n * (len(request.prompts) if request.messages is None else 1)
        if not 1 <= count <= MAX_CHOICES:
            raise InvalidField("n", f"prompts times n must be 1 to {MAX_CHOICES}, not {count}")
        if request.stream and params.prompt_logprobs is not None:
            raise InvalidField("prompt_logprobs", NO_STREAM)
        files = self._files.read(request.files)
        prompts = [self._truncated(ids, request.truncate, params) for ids in self._prompts_of(request, files)]
        check_scores("prompt_logprobs", params.prompt_logprobs, prompts, params.n)
        check_scores("logprobs", params.logprobs if request.echo else None, prompts, params.n)
        turn = self._turn(request, prompts[0]) if request.messages is not None else None
        preambles = {}
        begun = progress.tokens if progress is not None else {}
        if request.echo:
            is_whole = request.truncate is None
            texts = [self._text_of(p if is_whole else "", i) for p, i in zip(request.prompts, prompts, strict=False)]
            preambles = {i: texts[i // params.n] for i in range(count) if i // params.n < len(texts) and i not in begun}
        parsers = self._parsers(turn, prompts[0], params, progress) if turn is not None else []
        first_tokens = {}
        if request.echo and params.logprobs is not None and progress is None:
            first_tokens = {i: prompts[i // params.n][0] for i in range(count) if prompts[i // params.n]}
        reply = PieceFormat(
            self._tokenizer,
            stream=request.stream,
            num_choices=count,
            preambles=preambles,
            parsers=parsers,
            first_tokens=first_tokens,
            num_sound_tokens=self._files.num_sound_tokens(files),
            num_alternatives=params.logprobs or 0,
            prompts=prompts,
            num_prompt_alternatives=params.prompt_logprobs,
            returns_ids=request.returns_ids,
            begun=begun,
        )
        return Prompted(
            prompts=prompts,
            params=params,
            reply=reply,
            is_stream=request.stream,
            adapter=request.adapter,
            turn=turn,
            prompt_name="prompt" if request.messages is None else "messages",
            files=files,
            cache_salt=request.cache_salt,
        )

    def _truncated(self, ids: list[int], limit: int | None, params: SamplingParams) -> list[int]:
        """The end of a prompt, behind the token that begins every sequence."""
        if limit == ALL_THAT_FITS:
            limit = max(1, self._max_length - (params.max_tokens or 1))
        if limit is None or len(ids) <= limit:
            return ids
        begin = ids[:1] if ids[:1] == self._tokenizer.encode("")[:1] else []
        return [*begin, *ids[len(ids) - limit + len(begin) :]]

    def _turn(self, request: Generate, prompt_ids: Sequence[int]) -> ChatTurn:
        tools = [tool for tool in request.tools or () if request.tool_name in ("", tool["function"]["name"])]
        return self._format.turn(
            self._tokenizer,
            prompt_ids,
            tools=tools,
            must_call=request.tool_choice == "required",
            is_parallel=request.parallel_tool_calls and not request.tool_name,
            max_reasoning_tokens=self._reasoning_limit(request),
        )

    def _reasoning_limit(self, request: Generate) -> int | None:
        """The most tokens of reasoning; raises InvalidField for a model that has none to limit."""
        effort, limit = request.reasoning_effort, request.max_reasoning_tokens
        if limit is not None and not self._format.thinks:
            raise InvalidField(
                "max_reasoning_tokens", f"max_reasoning_tokens is {limit}, but the model does not reason; leave it out"
            )
        if effort is None or limit is not None or self._knows_effort:
            return limit
        if not self._format.thinks and effort != "none":
            raise InvalidField(
                "reasoning_effort", f"reasoning_effort is {effort!r}, but the model does not reason; leave it out"
            )
        if effort not in EFFORTS:
            raise InvalidField(
                "reasoning_effort", f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {effort[:40]!r}"
            )
        return EFFORTS[effort] if self._format.thinks else None

    @property
    def _knows_effort(self) -> bool:
        """Whether the chat template itself reads the effort."""
        return "reasoning_effort" in self._tokenizer.template_text

    def _parsers(
        self, turn: ChatTurn, prompt_ids: list[int], params: SamplingParams, progress: ResumeState | None
    ) -> list[StreamParser]:
        """A parser for each choice, which has read what another worker sent."""
        parsers = [turn.parser() for _ in range(params.n)]
        for index, tokens in progress.tokens.items() if progress is not None else ():
            detokenizer = self._tokenizer.detokenizer(
                prompt_ids,
                stop=params.stop,
                include_stop=params.include_stop,
                skip_special=params.skip_special_tokens,
                marker_texts=self._format.marker_texts,
            )
            parsers[index].take(detokenizer.push(tokens))
        return parsers

    def _prompts_of(self, request: Generate, files: ChatFiles) -> list[list[int]]:
        if request.messages is None:
            infill = self._infill(request.suffix)
            if infill is not None:
                return [self._encode_infill(infill, prompt, request.suffix) for prompt in request.prompts]
            return [self.encode(prompt, add_special=request.add_special) for prompt in request.prompts]
        options, text = dict(request.template_options), self._tokenizer.template_text
        if options.get("documents") and "documents" not in text:
            raise InvalidField(
                "documents", "the model's chat template does not show documents to the model; put them into a message"
            )
        if (request.max_reasoning_tokens == 0 or request.reasoning_effort == "none") and "enable_thinking" in text:
            options.setdefault("enable_thinking", False)
        if request.reasoning_effort is not None and self._knows_effort:
            options.setdefault("reasoning_effort", request.reasoning_effort)
        return [self._encode_messages(request.messages, request.tools, options, files)]

    def _infill(self, suffix: str) -> Infill | None:
        """How the model fills in before a suffix; None without one."""
        if not suffix:
            return None
        if self._tokenizer.infill is None:
            raise InvalidField("suffix", CANNOT_INFILL)
        return self._tokenizer.infill

    def _encode_infill(self, infill: Infill, prompt: str | list[int], suffix: str) -> list[int]:
        if not isinstance(prompt, str):
            raise InvalidField("prompt", "a prompt with a suffix must be text, not token ids; send the text itself")
        self._check_length(len(prompt) + len(suffix), "prompt")
        return infill.encode(check_text(prompt, "prompt"), check_text(suffix, "suffix"))

    def _encode_messages(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        files: ChatFiles,
    ) -> list[int]:
        if tools and not self._tokenizer.shows_tools:
            raise InvalidField("tools", "the model's chat template does not show tools to the model; leave tools out")
        options = {**options, **({"tools": tools} if tools else {})}
        if self._format.tools.ids == "short":
            messages = with_short_ids(messages)
        elif self._format.tools.ids == "named":
            messages = with_named_ids(messages)
        return self._encode_chat(messages, options, files)

    def tokenize(self, body: bytes | bytearray) -> bytes:
        """A request of kind `tokenize`: text or a chat → token ids, or token ids → text."""
        try:
            request = decode_tokenize(body)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        if isinstance(request, Detokenize):
            return encode_reply(self._detokenize(request.tokens))
        if request.messages is not None:
            files = self._files.read(request.files)
            ids = self._encode_messages(request.messages, request.tools, request.template_options, files)
        else:
            self._check_length(len(request.prompt), "prompt")
            ids = self._tokenizer.encode(check_text(request.prompt, "prompt"), add_special=request.add_special)
        texts = [self._tokenizer.token_text(token) for token in ids] if request.has_texts else None
        return encode_reply(Tokenized(tokens=ids, texts=texts, max_length=self._max_length))

    def _detokenize(self, ids: list[int]) -> Detokenized:
        size = self._tokenizer.vocab_size
        if not all(0 <= token < size for token in ids):
            raise BadRequest(f"tokens has ids outside of 0 … {size - 1}; send ids of this model's tokenizer")
        return Detokenized(text=self._tokenizer.decode(ids))

    def _text_of(self, prompt: str | list[int], ids: list[int]) -> str:
        return prompt if isinstance(prompt, str) and prompt else self._tokenizer.decode(ids)


def check_scores(name: str, alternatives: int | None, prompts: Sequence[Sequence[int]], num_choices: int) -> None:
    """Reject a reply with too many log-probabilities of prompts: each choice has them, and so many alternatives."""
    if alternatives is None:
        return
    number = (1 + alternatives) * num_choices * sum(map(len, prompts))
    if number > MAX_PROMPT_SCORES:
        raise InvalidField(
            name,
            f"{name}: the choices would have {number} log-probabilities of their prompts, and may have "
            f"{MAX_PROMPT_SCORES}; send fewer choices, alternatives or prompts",
        )


def num_characters(content: Any) -> int:
    """Of the text of a message, which may be in parts."""
    if isinstance(content, list):
        return sum(num_characters(part.get("text")) for part in content if isinstance(part, dict))
    return len(content) if isinstance(content, str) else 0


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
