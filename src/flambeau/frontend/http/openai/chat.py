"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openai import logprobs
from flambeau.frontend.http.openai.choosing import choose
from flambeau.frontend.http.openai.generating import generate, take_bytes
from flambeau.frontend.http.openai.messages import messages_of, shown, tools_of
from flambeau.frontend.http.openai.reading import read_json
from flambeau.frontend.http.openai.requests import ChatRequest, chat_decoder
from flambeau.frontend.http.openai.sampling import sampling_of_chat
from flambeau.frontend.http.openai.writing import Choice, Head, Writer, encode
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, Piece

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
    has_usage = bool(request.stream_options and request.stream_options.include_usage)
    head = Head.new("chatcmpl-", model, request.model)
    writer = ChatWriter(head, request.n or 1, has_logprobs=bool(request.logprobs), has_usage=has_usage)
    generate(exchange, model, version, generation, writer, details=server.config.tells_details)


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
        sampling=sampling_of_chat(request),
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


class ChatWriter(Writer):
    """Chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head, num_choices: int, *, has_logprobs: bool, has_usage: bool) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._begun: set[int] = set()  # choices whose role has been told

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A message of the assistant."""
        return {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs.of_chat(choice.tokens) if self._has_logprobs else None,
        }

    def events(self, piece: Piece) -> bytes:
        """The events of a piece: the role before the first text, the reason after the last."""
        events = b""
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            events = self._event(piece.index, b'{"role":"assistant","content":"","refusal":null}')
        if piece.text or piece.tokens:
            told = encode(logprobs.of_chat(piece.tokens)) if piece.tokens and self._has_logprobs else b"null"
            events += self._event(piece.index, b'{"content":%b}' % encode(piece.text), told)
        if piece.finish_reason is not None:
            self._usage.add(piece)
            events += self._event(piece.index, b"{}", reason=encode(piece.finish_reason))
        return events

    def _event(self, index: int, delta: bytes, told: bytes = b"null", reason: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            delta,
            told,
            reason,
            self._end,
        )
