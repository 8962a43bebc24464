"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openai.chat_writing import ChatWriter, ToolChatWriter
from flambeau.frontend.http.openai.choosing import choose
from flambeau.frontend.http.openai.generating import generate, take_bytes
from flambeau.frontend.http.openai.messages import messages_of, shown, tools_of
from flambeau.frontend.http.openai.reading import read_json
from flambeau.frontend.http.openai.requests import ChatRequest, chat_decoder
from flambeau.frontend.http.openai.sampling import sampling_of_chat
from flambeau.frontend.http.openai.writing import Head
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, SamplingOptions

REFUSED = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
    "audio": "this server answers in text",
    "web_search_options": "this server searches nothing",
}


def chat(server: Server, exchange: Exchange) -> None:
    """Answer a chat with the model's next message."""
    request = read_json(take_bytes(exchange), chat_decoder)
    generation = generation_of(request)
    model, version = choose(server.registry, request.model, "chat")
    writer = writer_of(request, generation, Head.new("chatcmpl-", model, request.model))
    generate(exchange, model, version, generation, writer, details=server.config.tells_details)


def writer_of(request: ChatRequest, generation: Generate, head: Head) -> ChatWriter:
    """Who writes the reply: where there are tools, calls are looked for."""
    has_usage = bool(request.stream_options and request.stream_options.include_usage)
    has_logprobs, num_choices = bool(request.logprobs), request.n or 1
    if not generation.tools:
        return ChatWriter(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
    names = {tool["function"]["name"] for tool in generation.tools}
    return ToolChatWriter(head, num_choices, names, has_logprobs=has_logprobs, has_usage=has_usage)


def generation_of(request: ChatRequest) -> Generate:
    """What the model is asked to generate."""
    for name, remedy in REFUSED.items():
        if getattr(request, name) is not None:
            raise InvalidField(name, f"{name} is not supported; {remedy}")
    check_format(request.response_format)
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    return Generate(
        messages=messages_of(request),
        tools=tools_of(request),
        template_options=options,
        sampling=SamplingOptions(**sampling_of_chat(request)),
        stream=bool(request.stream),
    )


def check_format(response_format: dict[str, Any] | None) -> None:
    """Refuse a form of answer that cannot be guaranteed."""
    if response_format is not None and response_format.get("type") != "text":
        kind = shown(response_format.get("type"))
        raise InvalidField(
            "response_format",
            f"response_format: its type may only be text, not {kind}: the text is not held to a grammar yet; "
            "describe the form in a message and check the answer",
        )
