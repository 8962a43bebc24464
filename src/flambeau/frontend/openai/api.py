"""OpenAiApi: the paths below /v1, and their description."""

from __future__ import annotations

from collections.abc import Callable

from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import TEXT, Operation, Schema
from flambeau.frontend.http.router import Endpoint
from flambeau.frontend.openai.chat import create_chat_completion
from flambeau.frontend.openai.completions import create_completion
from flambeau.frontend.openai.embeddings import create_embeddings
from flambeau.frontend.openai.errors import not_allowed, not_found
from flambeau.frontend.openai.models import get_models
from flambeau.frontend.openai.requests import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    request_schema,
)
from flambeau.frontend.openai.scores import create_classify, create_rerank, create_score
from flambeau.serving.server import Server

POST: dict[tuple[str, ...], Callable[[Server, Exchange], None]] = {
    ("chat", "completions"): create_chat_completion,
    ("completions",): create_completion,
    ("embeddings",): create_embeddings,
    ("rerank",): create_rerank,
    ("score",): create_score,
    ("classify",): create_classify,
}
KSERVE_VERBS = (":predict", ":explain")


class OpenAiApi:
    """OpenAI's paths; KServe's first protocol shares /v1 with them."""

    def __init__(self, server: Server, kserve_v1: Endpoint) -> None:
        self._server = server
        self._kserve_v1 = kserve_v1

    def routes(self) -> dict[str, Endpoint]:
        return {"v1": self.v1}

    def v1(self, exchange: Exchange, segments: list[str]) -> None:
        create = POST.get(tuple(segments[1:]))
        if create is None:
            if segments[1:2] != ["models"]:
                not_found(exchange)
            elif segments[-1].endswith(KSERVE_VERBS):
                self._kserve_v1(exchange, segments)
            else:
                get_models(self._server, exchange, segments)
        elif exchange.method == "POST":
            create(self._server, exchange)
        elif exchange.method == "OPTIONS":
            exchange.respond(200, b"")  # every response has the CORS headers
        else:
            not_allowed(exchange, "POST")


# ---- the API description ----

STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 507)
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": "string", "nullable": True, "description": "The invalid field."},
                "code": {"type": "string", "nullable": True},
                "cause": {
                    "type": "array",
                    "items": TEXT,
                    "description": "How a worker died; only on servers that show details.",
                },
            },
        }
    },
}


def _operation(path: str, operation_id: str, summary: str, request: type) -> Operation:
    return Operation(
        path=path,
        method="post",
        id=operation_id,
        summary=summary,
        body={"application/json": request_schema(request)},
        errors=STATUSES,
        error=ERROR,
    )


OPERATIONS = [
    _operation("/v1/chat/completions", "createChatCompletion", "Answer a chat (OpenAI).", ChatRequest),
    _operation("/v1/completions", "createCompletion", "Complete prompts (OpenAI).", CompletionRequest),
    _operation("/v1/embeddings", "createEmbedding", "Embed texts (OpenAI).", EmbeddingRequest),
    _operation("/v1/rerank", "createRerank", "Order documents by a query (Cohere, Jina, vLLM).", RerankRequest),
    _operation("/v1/score", "createScore", "Score pairs of texts (vLLM).", ScoreRequest),
    _operation("/v1/classify", "createClassification", "Classify texts (vLLM).", ClassifyRequest),
]
