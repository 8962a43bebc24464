"""POST /tokenize and /detokenize, in vLLM's format: prompts and chats ↔ the token ids of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import InvalidField, JobFailed
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.errors import JSON_TYPE
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.openai.chat import check_messages, template_options, tools_for_template
from flambeau.frontend.openai.chat_files import take_files
from flambeau.frontend.openai.models import choose_model
from flambeau.frontend.openai.requests import DetokenizeRequest, TokenizeRequest, read_request
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part
from flambeau.wire.tokenization import (
    Detokenize,
    Tokenize,
    decode_detokenized,
    decode_tokenized,
    encode_tokenize,
)

MAX_TOKENS = 1_000_000


def create_tokens(server: Server, exchange: Exchange) -> None:
    """POST /tokenize."""
    request = read_request(take_bytes(exchange), TokenizeRequest)
    asked = tokenize_of(request)
    model, version = choose_model(server.registry, request.model, "tokenize")
    submit_tokenize(exchange, model, version, asked, token_document, server.config.error_style)


def create_text(server: Server, exchange: Exchange) -> None:
    """POST /detokenize."""
    request = read_request(take_bytes(exchange), DetokenizeRequest)
    if len(request.tokens) > MAX_TOKENS:
        raise InvalidField("tokens", f"tokens has {len(request.tokens)} ids; send at most {MAX_TOKENS} at a time")
    model, version = choose_model(server.registry, request.model, "tokenize")
    asked = Detokenize(tokens=request.tokens)
    submit_tokenize(exchange, model, version, asked, text_document, server.config.error_style)


def tokenize_of(request: TokenizeRequest) -> Tokenize:
    """Special tokens begin a prompt unless the request says otherwise; a chat template writes its own."""
    has_texts = bool(request.return_token_strs)
    if request.messages is None:
        if request.prompt is None:
            raise InvalidField("prompt", "prompt is required, or messages; send one of them")
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise InvalidField(name, f"{name} is for messages; leave it out, or send messages instead of a prompt")
        return Tokenize(prompt=request.prompt, add_special=request.add_special_tokens is not False, has_texts=has_texts)
    if request.prompt is not None:
        raise InvalidField("prompt", "prompt and messages are both given; send one of them")
    if request.add_special_tokens:
        raise InvalidField(
            "add_special_tokens", "add_special_tokens is for a prompt; the chat template writes those of messages"
        )
    messages, files = take_files(check_messages(request.messages))
    return Tokenize(
        messages=messages,
        files=files,
        tools=tools_for_template(request.tools or []) or None,
        template_options=template_options(request),
        has_texts=has_texts,
    )


Reply = Callable[[bytes], dict[str, Any]]


def token_document(body: bytes) -> dict[str, Any]:
    found = decode_tokenized(body)
    return {
        "count": len(found.tokens),
        "max_model_len": found.max_length,
        "tokens": found.tokens,
        "token_strs": found.texts,
    }


def text_document(body: bytes) -> dict[str, Any]:
    return {"prompt": decode_detokenized(body).text}


class TokenizationReply(Prediction):
    """Writes the reply of a job of kind `tokenize` as a JSON document."""

    __slots__ = ("_chunks", "_document")

    def __init__(self, exchange: Exchange, model: Model, style: ErrorStyle, document: Reply) -> None:
        super().__init__(exchange, model, style)
        self._document = document
        self._chunks: list[bytes] = []

    def on_parts(self, parts: list[Part]) -> None:
        self._chunks += [part.body for part in parts]
        if not parts[-1].last:
            return
        body = b"".join(self._chunks)
        try:
            document = self._document(body)
        except msgspec.DecodeError:
            text = f"The handler of {self.model.name!r} does not tokenize as it says; its reply cannot be read."
            self.on_error(JobFailed(text, status=500))
            return
        self.exchange.respond(200, msgspec.json.encode(document) + b"\n", (JSON_TYPE,))


def submit_tokenize(
    exchange: Exchange,
    model: Model,
    version: str | None,
    request: Tokenize | Detokenize,
    document: Reply,
    style: ErrorStyle,
) -> None:
    """Submit a request as a job; `document` makes the response of its reply."""
    reply = TokenizationReply(exchange, model, style, document)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=[],
        body=RequestBody(encode_tokenize(request)),
        arrived=exchange.arrived,
        kind="tokenize",
    )
    submit(reply, job, version)
