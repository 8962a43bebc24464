"""AnthropicApi: /v1/messages, and their description."""

from __future__ import annotations

from flambeau.frontend.anthropic.messages import count_tokens, create_message
from flambeau.frontend.anthropic.requests import CountTokensRequest, MessagesRequest
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import TEXT, Schema
from flambeau.frontend.openai.api import Create, operation, post
from flambeau.frontend.openai.errors import not_found
from flambeau.frontend.openai.responses import Work
from flambeau.serving.server import Server

PATHS: dict[tuple[str, ...], Create] = {("messages",): create_message, ("messages", "count_tokens"): count_tokens}
ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"type": "string", "enum": ["error"]},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}},
    },
}
OPERATIONS = [
    operation("/v1/messages", "createMessage", "Answer messages (Anthropic).", MessagesRequest, ERROR),
    operation(
        "/v1/messages/count_tokens",
        "countMessageTokens",
        "The number of tokens of messages (Anthropic).",
        CountTokensRequest,
        ERROR,
    ),
]


class AnthropicApi:
    """Anthropic's paths below /v1/messages."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def v1(self, exchange: Exchange, segments: list[str]) -> Work:
        if (create := PATHS.get(tuple(segments[1:]))) is None:
            not_found(exchange)
            return None
        return post(self._server, create, exchange)
