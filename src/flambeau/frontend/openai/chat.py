"""POST /v1/chat/completions: a chat → a generation request, and its reply → a completion or chunks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.fields import shown
from flambeau.frontend.openai.models import choose_model
from flambeau.frontend.openai.requests import ChatRequest, Object, TextRequest, read_request
from flambeau.frontend.openai.responses import ResponseChoice, ResponseHead, ResponseWriter, encode, finite, generate
from flambeau.frontend.openai.tool_calls import ToolCall, ToolCallParser, parse_tool_calls
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, Piece, SamplingOptions, Token

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PLAIN_ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 10_000


def create_chat_completion(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), ChatRequest)
    generation = generation_of(request)
    model, version = choose_model(server.registry, request.model, "chat")
    writer = writer_of(request, generation, ResponseHead.new("chatcmpl-", model, request.model))
    generate(exchange, model, version, generation, writer, style=server.config.error_style)


def writer_of(request: ChatRequest, generation: Generate, head: ResponseHead) -> ChatWriter:
    has_logprobs, num_choices = bool(request.logprobs), request.num_choices
    if not generation.tools:
        return ChatWriter(head, num_choices, has_logprobs=has_logprobs, has_usage=request.has_usage)
    names = {tool["function"]["name"] for tool in generation.tools}
    return ToolChatWriter(head, num_choices, names, has_logprobs=has_logprobs, has_usage=request.has_usage)


def generation_of(request: ChatRequest) -> Generate:
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    return Generate(
        messages=messages_of(request),
        tools=tools_of(request),
        template_options=options,
        sampling=sampling_of(request),
        stream=bool(request.stream),
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
        check_content(content, f"{place}.content")
    elif not calls:
        raise InvalidField(f"{place}.content", f"{place}.content is required; send text")
    if calls:
        check_calls(calls, f"{place}.tool_calls")
    return {**message, "role": "system"} if role == "developer" else message


def check_content(content: Any, place: str) -> None:
    """Reject content that is not text, such as images and audio."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise InvalidField(place, f"{place} must be text, or a list of text parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            where = f"{place}[{i}]"
            raise InvalidField(where, f"{where} must be a text part, not {shown(kind)}: this server reads text only")


def check_calls(calls: Any, place: str) -> None:
    """Check the tool calls in an earlier message of the model."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(place, f"{place} must be a list of calls, each with a function that has a name")


def tools_of(request: ChatRequest) -> list[Object] | None:
    """The tools for the chat template. Rejects a tool_choice that would force the model to call one."""
    choice = request.tool_choice
    if not (choice is None or choice in ("auto", "none")):
        raise InvalidField(
            "tool_choice",
            f"tool_choice may be auto or none, not {shown(choice)}: no model can be made to call a tool; ask for its "
            "arguments with response_format",
        )
    tools = tools_for_template(request.tools or [])
    return tools if tools and choice != "none" else None


def tools_for_template(tools: list[Object]) -> list[Object]:
    """Check tools in OpenAI's format."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise InvalidField(f"tools[{i}]", f"tools[{i}] must have the type function, and a function with a name")
    return tools


class ChatWriter(ResponseWriter):
    """Writes chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: ResponseHead, num_choices: int, *, has_logprobs: bool, has_usage: bool) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._begun: set[int] = set()  # choices whose role was sent

    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.tokens) if self._has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def events(self, piece: Piece) -> bytes:
        """The role comes before the first text, the finish reason after the last."""
        events = self._role(piece.index)
        if piece.text or piece.tokens:
            events += self._event(piece.index, content(piece.text), self._logprobs(piece.tokens))
        return events + self._last(piece, piece.finish_reason)

    def _role(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._event(index, b'{"role":"assistant","content":"","refusal":null}')

    def _logprobs(self, tokens: Sequence[Token] | None) -> bytes:
        return encode(chat_logprobs(tokens)) if tokens and self._has_logprobs else b"null"

    def _last(self, piece: Piece, reason: str | None) -> bytes:
        if reason is None:
            return b""
        self._usage.add(piece)
        return self._event(piece.index, b"{}", reason=encode(reason))

    def _event(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            delta,
            logprobs,
            reason,
            self._end,
        )


class ToolChatWriter(ChatWriter):
    """Writes chats with tools: a tool call in the text is held back until it is complete, and sent as one."""

    def __init__(
        self, head: ResponseHead, num_choices: int, names: Collection[str], *, has_logprobs: bool, has_usage: bool
    ) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._names = names
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(lambda: ToolCallParser(names))
        self._num_calls: defaultdict[int, int] = defaultdict(int)
        self._unsent: defaultdict[int, list[Token]] = defaultdict(list)  # tokens of text that is held back

    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        plain, calls = parse_tool_calls(choice.text, self._names)
        document = super().choice(choice)
        if calls:
            document["message"] |= {"content": plain or None, "tool_calls": [call_document(call) for call in calls]}
            document["finish_reason"] = reason_of(choice.finish_reason, has_called=True)
        return document

    def events(self, piece: Piece) -> bytes:
        """The text, each tool call as a whole, and the finish reason after the last."""
        index, is_over = piece.index, piece.finish_reason is not None
        parser, unsent = self._parsers[index], self._unsent[index]
        unsent += piece.tokens or ()
        plain, calls = parser.take(piece.text)
        if is_over:
            last_plain, last_calls = parser.finish()
            plain, calls = plain + last_plain, calls + last_calls
        deltas = [content(plain)] if plain or (is_over and unsent and not calls) else []
        deltas += [self._call(index, call) for call in calls]
        events = self._role(index)
        for delta in deltas:
            events += self._event(index, delta, self._logprobs(unsent))
            unsent.clear()
        return events + self._last(piece, reason_of(piece.finish_reason, has_called=parser.has_called))

    def _call(self, index: int, call: ToolCall) -> bytes:
        number, self._num_calls[index] = self._num_calls[index], self._num_calls[index] + 1
        return encode({"tool_calls": [{"index": number, **call_document(call)}]})


def content(text: str) -> bytes:
    return b'{"content":%b}' % encode(text)


def call_document(call: ToolCall) -> dict[str, Any]:
    call_id = f"call_{random.getrandbits(96):024x}"  # distinct, not secret
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reason_of(reason: str | None, *, has_called: bool) -> str | None:
    """The finish reason of a choice; one that was cut short keeps its reason."""
    return "tool_calls" if has_called and reason == "stop" else reason


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [_entry(token) for token in tokens], "refusal": None}


def _entry(token: Token) -> dict[str, Any]:
    top = [_alternative(text, logprob, data) for _, text, logprob, data in token.top]
    return {**_alternative(token.text, token.logprob, token.data), "top_logprobs": top}


def _alternative(text: str, logprob: float | None, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data or text.encode())}
