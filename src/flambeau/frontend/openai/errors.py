"""404 and 405 below /v1, in OpenAI's format, with the paths and methods that exist."""

from __future__ import annotations

from flambeau.frontend.http.errors import (
    JSON_TYPE,
    anthropic_error,
    is_anthropic,
    is_openai,
    openai_error,
    openai_error_body,
    to_document,
    to_json,
)
from flambeau.frontend.http.exchange import Exchange

PATHS = (
    "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, POST /v1/embeddings, "
    "POST /v1/audio/transcriptions, POST /v1/audio/translations, POST /v1/audio/speech, GET /v1/models, "
    "GET /v1/models/{model}, /v1/files and /v1/batches; "
    "of Anthropic's, POST /v1/messages and POST /v1/messages/count_tokens; "
    "of vLLM's, POST /tokenize, POST /detokenize, POST /v1/rerank, POST /v1/score and POST /v1/classify"
)
MAX_SHOWN = 200


def not_found(exchange: Exchange) -> None:
    text = f"There is no {exchange.method} {exchange.path[:MAX_SHOWN]} here. Of OpenAI's API there are {PATHS}."
    if exchange.path.startswith("/v1/v1/"):
        text = f"There is no {exchange.path[:MAX_SHOWN]} here; remove one /v1 from the client's base URL."
    elif exchange.path.endswith("load_lora_adapter"):
        text = f"{exchange.path[:MAX_SHOWN]} is at the address of the management API, and needs its key."
    exchange.respond(404, body(exchange.path, 404, "ResourceNotFoundException", text), (JSON_TYPE,))


def not_allowed(exchange: Exchange, *methods: str) -> None:
    text = f"{exchange.path[:MAX_SHOWN]} does not take {exchange.method}; use {' or '.join(methods)}."
    headers = (JSON_TYPE, ("allow", ", ".join(methods)))
    exchange.respond(405, body(exchange.path, 405, "MethodNotAllowedException", text), headers)


def body(path: str, status: int, kind: str, text: str) -> bytes:
    """The document; below /v1/models, which KServe has too, in the format of both APIs."""
    if is_anthropic(path):
        return to_json(anthropic_error(status, text))
    if is_openai(path):
        return openai_error_body(status, text)
    return to_json(to_document(status, kind, text, more={"error": openai_error(status, text)}))
