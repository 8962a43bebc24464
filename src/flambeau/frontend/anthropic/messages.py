"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's requests and replies, as translations of chats."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from flambeau.errors import FlambeauError
from flambeau.frontend.anthropic.requests import CLIENT_NAMES, CountTokensRequest, MessagesRequest, to_chat
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.errors import anthropic_error
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.chat import ChatWriter, generation_of, writer_of
from flambeau.frontend.openai.chat_translation import ChatTranslation, Document, client_names, to_event
from flambeau.frontend.openai.models import choose_generator, choose_model
from flambeau.frontend.openai.requests import ChatRequest, read_request
from flambeau.frontend.openai.responses import ResponseHead, Work, generate
from flambeau.frontend.openai.tokenization import submit_tokenize
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate
from flambeau.wire.tokenization import Tokenize, decode_tokenized

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def create_message(server: Server, exchange: Exchange) -> Work:
    """POST /v1/messages."""
    request = read_request(take_bytes(exchange), MessagesRequest)
    chat = to_chat(request)
    generation = checked_generation(chat)
    model, version, generation = choose_generator(server.registry, exchange, request.model, "chat", generation)
    head = ResponseHead.new("chatcmpl-", model, request.model)
    writer = MessageWriter(writer_of(chat, head))
    return generate(server, exchange, model, version, generation, writer)


def count_tokens(server: Server, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens."""
    request = read_request(take_bytes(exchange), CountTokensRequest)
    generation = checked_generation(to_chat(request))
    model, version = choose_model(server.registry, request.model, "tokenize")
    asked = Tokenize(
        messages=generation.messages,
        files=generation.files,
        tools=generation.tools,
        template_options=generation.template_options,
    )
    submit_tokenize(exchange, model, version, asked, count_document, server.config.error_style)


def count_document(body: bytes) -> Document:
    return {"input_tokens": len(decode_tokenized(body).tokens)}


def checked_generation(chat: ChatRequest) -> Generate:
    with client_names(CLIENT_NAMES):
        return generation_of(chat)


class MessageWriter(ChatTranslation):
    """Writes a chat as a message: content blocks, one after another, each begun and ended."""

    names: Mapping[str, str] = CLIENT_NAMES

    def __init__(self, chat: ChatWriter) -> None:
        super().__init__(chat)
        self._id = f"msg_{random.getrandbits(96):024x}"  # unique, not secret
        self._has_begun = False
        self._num_blocks = 0
        self._open: tuple[str, int] | None = None  # the kind of the block that is open, and the number of its call
        self._reason: str | None = None

    # ---- whole ----

    def document(self, completion: Document) -> Document:
        [choice] = completion["choices"]
        reason = choice["finish_reason"]
        return self._message(content_of(choice["message"]), reason, usage_of(completion["usage"]))

    def _message(self, content: list[Document], reason: str | None, usage: Document) -> Document:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**head, **self._stop_fields(reason), "usage": usage}

    def _stop_fields(self, reason: str | None) -> Document:
        if reason == "stop" and self._stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        return {"stop_reason": reason and STOP_REASONS.get(reason, reason), "stop_sequence": None}

    # ---- streamed ----

    def on_chunk(self, chunk: Document) -> Iterator[Document]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._message([], None, usage_of({}))}
        for choice in chunk["choices"]:
            yield from self._on_delta(choice["delta"])
            self._reason = choice["finish_reason"] or self._reason

    def _on_delta(self, delta: Document) -> Iterator[Document]:
        if thought := delta.get("reasoning_content"):
            yield from self._switch("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._switch("text", 0, {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            block = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            yield from self._switch("tool_use", call["index"], block)
            if arguments := function.get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _switch(self, kind: str, number: int, block: Document) -> Iterator[Document]:
        """End the block that is open, and begin this one, unless it is the open one."""
        if self._open == (kind, number):
            return
        yield from self._close()
        self._open = (kind, number)
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _delta(self, delta: Document) -> Document:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _close(self) -> Iterator[Document]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._open = None
            self._num_blocks += 1

    def on_end(self, usage: Document) -> Iterable[Document]:
        yield from self._close()
        yield {"type": "message_delta", "delta": self._stop_fields(self._reason), "usage": usage_of(usage)}
        yield {"type": "message_stop"}

    def error(self, status: int, message: str, error: FlambeauError, cause: str) -> bytes:
        return to_event(anthropic_error(status, message))


def content_of(message: Document) -> list[Document]:
    """The content blocks of a whole message: thoughts, text, then calls."""
    blocks: list[Document] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    return blocks + [tool_block(call) for call in message.get("tool_calls") or ()]


def tool_block(call: Document) -> Document:
    """A call; one that was cut short has arguments that are no JSON, and is returned as text."""
    function = call["function"]
    try:
        given: Any = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return {"type": "text", "text": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def usage_of(usage: Document) -> Document:
    """The tokens of a message; those of the prompt that were cached are counted apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }
