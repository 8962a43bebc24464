"""The paths of Anthropic's API, and their description."""

from __future__ import annotations

from flambeau.frontend.anthropic.messages import count_tokens, create_message
from flambeau.frontend.anthropic.requests import CountTokensRequest, MessagesRequest
from flambeau.frontend.http.openapi import TEXT, Schema
from flambeau.frontend.openai.api import operation

PATHS = {("messages",): create_message, ("messages", "count_tokens"): count_tokens}
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
