"""Answers below /v1 where there is nothing, or nothing for this method: in OpenAI's shape, with the remedy."""

from __future__ import annotations

from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openai.problems import is_openai, openai_error, openai_problem
from flambeau.frontend.http.problems import JSON_TYPE, to_document, to_json

PATHS = (
    "POST /v1/chat/completions, POST /v1/completions, POST /v1/embeddings, GET /v1/models and GET /v1/models/{model}"
)
MAX_SHOWN = 200


def not_found(exchange: Exchange) -> None:
    """Answer that there is nothing at this path, and what there is."""
    text = f"There is no {exchange.method} {exchange.path[:MAX_SHOWN]} here. Of OpenAI's API there are {PATHS}."
    exchange.respond(404, body(exchange.path, 404, "ResourceNotFoundException", text), (JSON_TYPE,))


def not_allowed(exchange: Exchange, *methods: str) -> None:
    """Answer that this path does not take this method, and which it does."""
    text = f"{exchange.path[:MAX_SHOWN]} does not take {exchange.method}; use {' or '.join(methods)}."
    headers = (JSON_TYPE, ("allow", ", ".join(methods)))
    exchange.respond(405, body(exchange.path, 405, "MethodNotAllowedException", text), headers)


def body(path: str, status: int, kind: str, text: str) -> bytes:
    """The document; where KServe has paths too, one that clients of either API understand."""
    if is_openai(path):
        return openai_problem(status, text)
    return to_json(to_document(status, kind, text, more={"error": openai_error(status, text)}))
