"""POST /v1/chat/completions: a chat → a generation request, and its reply → a completion or chunks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flambeau.errors import InvalidField, suggest
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.chat_files import take_files
from flambeau.frontend.openai.fields import shown
from flambeau.frontend.openai.file_parts import KINDS, check_file, is_file
from flambeau.frontend.openai.models import choose_generator
from flambeau.frontend.openai.priorities import apply_priority
from flambeau.frontend.openai.requests import ChatRequest, Object, TextRequest, TokenizeRequest, read_request
from flambeau.frontend.openai.responses import (
    ResponseChoice,
    ResponseHead,
    ResponseWriter,
    TokenName,
    ToolCall,
    Work,
    encode,
    finite,
    generate,
    members,
    new_call_id,
    own_name,
    prompt_fields,
)
from flambeau.serving.server import Server
from flambeau.wire.generation import CallPiece, Generate, Piece, SamplingOptions, Token

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PLAIN_ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 10_000
FILE_PARTS = " or ".join((", ".join(("text", *KINDS)[:-1]), [*KINDS][-1]))
TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")


def create_chat_completion(server: Server, exchange: Exchange) -> Work:
    request = read_request(take_bytes(exchange), ChatRequest)
    apply_priority(exchange, request.priority)
    generation = generation_of(request)
    model, version, generation = choose_generator(server.registry, exchange, request.model, "chat", generation)
    writer = writer_of(request, ResponseHead.new("chatcmpl-", model, request.model))
    return generate(server, exchange, model, version, generation, writer)


def writer_of(request: ChatRequest, head: ResponseHead) -> ChatWriter:
    return ChatWriter(
        head,
        request.num_choices,
        has_logprobs=bool(request.logprobs),
        has_usage=request.has_usage,
        names=request.names,
        shows_ids=bool(request.return_tokens_as_token_ids),
    )


def generation_of(request: ChatRequest) -> Generate:
    check_prompt_options(request)
    tools = tools_for_template(request.tools or []) or None
    choice, name = read_tool_choice(request.tool_choice, tools)
    messages, files = take_files(messages_of(request))
    if files and request.truncate_prompt_tokens is not None:
        raise InvalidField(
            "truncate_prompt_tokens", "truncate_prompt_tokens is not supported with files; send fewer messages"
        )
    return Generate(
        messages=messages,
        files=files,
        tools=tools if choice != "none" else None,
        tool_choice="required" if choice == "required" else "auto",
        tool_name=name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=request.reasoning_effort,
        max_reasoning_tokens=reasoning_limit(request),
        template_options=template_options(request),
        sampling=sampling_of(request),
        stream=bool(request.stream),
        **request.prompt_options,
    )


def reasoning_limit(request: ChatRequest) -> int | None:
    """The most tokens of reasoning, by either of its names."""
    own, other = request.max_reasoning_tokens, request.thinking_token_budget
    if None not in (own, other) and own != other:
        raise InvalidField(
            "thinking_token_budget", "thinking_token_budget and max_reasoning_tokens differ; leave one of them out"
        )
    return other if own is None else own


def template_options(request: ChatRequest | TokenizeRequest) -> Object:
    """The variables of the chat template that a request sets."""
    options = dict(request.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "continue_final_message", "documents"):
        if (value := getattr(request, name, None)) is not None:
            options[name] = value
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise InvalidField(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; send one of them",
        )
    return options


def check_prompt_options(request: ChatRequest) -> None:
    if request.add_special_tokens:
        raise InvalidField(
            "add_special_tokens", "add_special_tokens must be false or left out in a chat; the template writes them"
        )


def sampling_of(request: ChatRequest) -> SamplingOptions:
    check_combination(request)
    sampling = dict(request.sampling)
    if (structure := request.structured_outputs) is not None:
        sampling["structured_outputs"] = structure
    if (most := request.max_tokens) is not None:
        sampling["max_tokens"] = most
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise InvalidField("top_logprobs", "top_logprobs needs logprobs to be true")
    return SamplingOptions(**sampling)


def check_combination(request: TextRequest) -> None:
    """Reject fields that contradict each other."""
    if request.truncate_prompt_tokens == 0:
        raise InvalidField("truncate_prompt_tokens", "truncate_prompt_tokens must be a number of tokens from 1, or -1")
    if request.sampling.get("allowed_token_ids") == []:
        raise InvalidField("allowed_token_ids", "allowed_token_ids must be at least one token id, or be left out")
    if request.spaces_between_special_tokens and request.sampling.get("skip_special_tokens") is False:
        raise InvalidField(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens must be false with skip_special_tokens: false; no spaces are added",
        )
    if request.stream and request.sampling.get("prompt_logprobs") is not None:
        raise InvalidField("prompt_logprobs", "prompt_logprobs come with whole replies only; leave stream out")
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options", "stream_options needs stream to be true")
    least, most = request.sampling.get("min_tokens", 0), request.max_tokens
    if most is not None and least > most:
        raise InvalidField("min_tokens", f"min_tokens must be at most max_tokens ({most})")


# ---- messages and tools; the chat template in the worker renders them ----


def messages_of(request: ChatRequest) -> list[Object]:
    return check_messages(request.messages)


def check_messages(messages: list[Object]) -> list[Object]:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidField("messages", f"messages must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    return [
        message if is_plain(message) else message_of(message, f"messages[{i}]") for i, message in enumerate(messages)
    ]


def is_plain(message: Object) -> bool:
    """Whether a message needs no further checks, like most."""
    return message.get("role") in PLAIN_ROLES and type(message.get("content")) is str and "tool_calls" not in message


def message_of(message: Object, place: str) -> Object:
    """A checked message; templates know the role `developer` as `system`."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None:
        check_content(content, f"{place}.content", takes_files=role == "user")
    elif not calls:
        raise InvalidField(f"{place}.content", f"{place}.content is required; send text")
    if calls:
        check_calls(calls, f"{place}.tool_calls")
    return {**message, "role": "system"} if role == "developer" else message


def check_content(content: Any, place: str, *, takes_files: bool) -> None:
    """Reject content that is neither text nor, where it may be, a file of a kind that a model may read."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise InvalidField(place, f"{place} must be text, or a list of text parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{place}[{i}]"
        if takes_files and is_file(part):
            check_file(part, where)
        elif kind != "text" or not isinstance(part.get("text"), str):
            known = FILE_PARTS if takes_files else "text; only messages of the user have images, videos and sounds"
            raise InvalidField(where, f"{where} is a part of the type {shown(kind)}; send parts of the type {known}")


def check_calls(calls: Any, place: str) -> None:
    """Check the tool calls in an earlier message of the model."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(place, f"{place} must be a list of calls, each with a function that has a name")


FUNCTION_FIELDS = ("parameters", "strict", "name", "description")


def tools_for_template(tools: list[Object]) -> list[Object]:
    """Check tools in OpenAI's format."""
    names = set()
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(name, str)
            or not TOOL_NAME.fullmatch(name)
        ):
            raise InvalidField(
                f"tools[{i}]",
                f"tools[{i}] must have the type function, and a function with a name of letters, digits, '.', ':', '_' "
                "and '-'",
            )
        if name in names:
            raise InvalidField(f"tools[{i}]", f"tools[{i}]: two tools have the name {name!r}; rename one")
        names.add(name)
        assert isinstance(function, dict)
        if (field := next((field for field in FUNCTION_FIELDS if field in tool), None)) is not None:
            raise InvalidField(f"tools[{i}].{field}", f"tools[{i}].{field} belongs into tools[{i}].function")
        check_tool_fields(function, f"tools[{i}].function")
    return tools


def check_tool_fields(function: Object, place: str) -> None:
    for name in function:  # the chat template may use others
        if name not in FUNCTION_FIELDS and (near := suggest(name, FUNCTION_FIELDS, cutoff=0.8)):
            raise InvalidField(f"{place}.{name}", f"unknown field {place}.{name}; did you mean {near}?")
    parameters, strict = function.get("parameters"), function.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidField(f"{place}.parameters", f"{place}.parameters must be a JSON schema, as an object")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidField(f"{place}.strict", f"{place}.strict must be true or false, not {shown(strict)}")


def read_tool_choice(choice: str | Object | None, tools: list[Object] | None) -> tuple[str, str]:
    """`auto`, `none` or `required`, and the name of the tool that must be called, if it is one."""
    if choice is None or choice in ("auto", "none"):
        return str(choice or "auto"), ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise InvalidField(
            "tool_choice",
            "tool_choice must be auto, none, required, or an object of the type function with the name of a tool, not "
            f"{shown(choice)}",
        )
    known = [tool["function"]["name"] for tool in tools or ()]
    if not known:
        raise InvalidField("tool_choice", "tool_choice asks for a call, but the request has no tools; send some")
    if name is not None and name not in known:
        raise InvalidField("tool_choice", f"tool_choice names {shown(name)}, which is not among the tools")
    return "required", name or ""


class ChatWriter(ResponseWriter):
    """Writes chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: ResponseHead, num_choices: int, **options: Any) -> None:
        super().__init__(head, num_choices, **options)
        self._begun: set[int] = set()  # choices whose role was sent

    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        return {
            "message": message_document(choice),
            "logprobs": chat_logprobs(choice.tokens, self._name) if self._has_logprobs else None,
            "finish_reason": choice.finish_reason,
            **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
        }

    def shared(self, first: ResponseChoice) -> dict[str, Any]:
        """All choices have the same prompt."""
        ids = {} if first.prompt_ids is None else {"prompt_token_ids": first.prompt_ids}
        return {**prompt_fields(first), **ids}

    def events(self, piece: Piece) -> bytes:
        """The role comes before the first text, the finish reason after the last."""
        if piece.index in self._begun and is_text_alone(piece):  # like most pieces
            return self._event(piece.index, b'{"content":%b}' % encode(piece.text))
        events, logprobs = self._role(piece), self._logprobs(piece.tokens)
        reason = b"null" if piece.token_ids is None else b"null" + members({"token_ids": piece.token_ids})
        for delta in deltas_of(piece):
            events += self._event(piece.index, delta, logprobs, reason)
            logprobs = reason = b"null"  # they are sent once
        return events + self._last(piece, piece.finish_reason)

    def _role(self, piece: Piece) -> bytes:
        index = piece.index
        if index in self._begun:
            return b""
        self._begun.add(index)
        delta = b'{"role":"assistant","content":"","refusal":null}'
        if piece.prompt_ids is None:
            return self._event(index, delta)
        return self._event(
            index, delta, end=b"]" + members({"prompt_token_ids": piece.prompt_ids}) + self._end.removeprefix(b"]")
        )

    def _logprobs(self, tokens: Sequence[Token] | None) -> bytes:
        return encode(chat_logprobs(tokens, self._name)) if tokens and self._has_logprobs else b"null"

    def _last(self, piece: Piece, reason: str | None) -> bytes:
        if reason is None:
            return b""
        self._usage.add(piece)
        return self._event(piece.index, b"{}", reason=encode(reason))

    def _event(
        self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null", end: bytes = b""
    ) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            delta,
            logprobs,
            reason,
            end or self._end,
        )


def message_document(choice: ResponseChoice) -> dict[str, Any]:
    """The model's message. Reasoning has two names among clients, so it has both here."""
    document: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        document |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
    if choice.calls:
        document |= {"content": choice.text or None, "tool_calls": [call_document(call) for call in choice.calls]}
    return document


def call_document(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def is_text_alone(piece: Piece) -> bool:
    """Whether one delta has all of a piece."""
    has_more = piece.reasoning or piece.calls or piece.tokens or piece.token_ids is not None or piece.finish_reason
    return bool(piece.text) and not has_more


def deltas_of(piece: Piece) -> list[bytes]:
    """The deltas of a piece, in the order in which the model wrote them."""
    deltas = []
    if piece.reasoning:
        reasoning = encode(piece.reasoning)
        deltas.append(b'{"reasoning_content":%b,"reasoning":%b}' % (reasoning, reasoning))
    has_tokens = piece.tokens or piece.token_ids
    if piece.text or (has_tokens and not piece.reasoning and not piece.calls):
        deltas.append(b'{"content":%b}' % encode(piece.text))
    return deltas + [encode({"tool_calls": [call_delta(call)]}) for call in piece.calls]


def call_delta(call: CallPiece) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **call_document(ToolCall(new_call_id(), call.name, call.arguments))}


def chat_logprobs(tokens: Sequence[Token], name: TokenName = own_name) -> dict[str, Any]:
    return {"content": [_entry(token, name) for token in tokens], "refusal": None}


def _entry(token: Token, name: TokenName) -> dict[str, Any]:
    top = [_alternative(name(i, text), logprob, data or text.encode()) for i, text, logprob, data in token.top]
    own = _alternative(name(token.id, token.text), token.logprob, token.data or token.text.encode())
    return {**own, "top_logprobs": top}


def _alternative(text: str, logprob: float | None, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}
