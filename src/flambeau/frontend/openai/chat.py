"""POST /v1/chat/completions: messages, tools and sampling of a chat → a generation request."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.chat_responses import ChatWriter, ToolChatWriter
from flambeau.frontend.openai.fields import shown
from flambeau.frontend.openai.models import choose_model
from flambeau.frontend.openai.requests import ChatRequest, Object, TextRequest, read_request
from flambeau.frontend.openai.responses import ResponseHead, generate
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, SamplingOptions

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PLAIN_ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 10_000


def create_chat_completion(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), ChatRequest)
    generation = generation_of(request)
    model, version = choose_model(server.registry, request.model, "chat")
    writer = writer_of(request, generation, ResponseHead.new("chatcmpl-", model, request.model))
    generate(exchange, model, version, generation, writer, details=server.config.shows_error_details)


def writer_of(request: ChatRequest, generation: Generate, head: ResponseHead) -> ChatWriter:
    has_logprobs, num_choices = bool(request.logprobs), request.num_choices
    if not generation.tools:
        return ChatWriter(head, num_choices, has_logprobs=has_logprobs, has_usage=request.has_usage)
    names = {tool["function"]["name"] for tool in generation.tools}
    return ToolChatWriter(head, num_choices, names, has_logprobs=has_logprobs, has_usage=request.has_usage)


def generation_of(request: ChatRequest) -> Generate:
    check_format(request.response_format)
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


def check_format(response_format: Object | None) -> None:
    if response_format is not None and response_format.get("type") != "text":
        kind = shown(response_format.get("type"))
        raise InvalidField(
            "response_format",
            f"response_format: its type may only be text, not {kind}: the text is not held to a grammar yet; "
            "describe the form in a message and check the answer",
        )


def sampling_of(request: ChatRequest) -> SamplingOptions:
    check_combination(request)
    sampling = dict(request.sampling)
    most = request.max_completion_tokens
    if most is not None:
        if sampling.get("max_tokens", most) != most:
            raise InvalidField("max_tokens", "max_tokens and max_completion_tokens differ; leave max_tokens out")
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
    least, most = request.sampling.get("min_tokens", 0), request.sampling.get("max_tokens")
    if most is not None and least > most:
        raise InvalidField("min_tokens", f"min_tokens must be at most max_tokens ({most})")


# ---- messages and tools; the chat template in the worker renders them ----


def messages_of(request: ChatRequest) -> list[Object]:
    messages = request.messages
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
            f"tool_choice may be auto or none, not {shown(choice)}: no model can be made to call a tool; ask for it "
            "in a message, and check the answer",
        )
    tools = request.tools or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise InvalidField(f"tools[{i}]", f"tools[{i}] must have the type function, and a function with a name")
    return tools if tools and choice != "none" else None
