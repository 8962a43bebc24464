"""OpenAiApi: the paths below /v1, and their description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import OPENAI_ERROR, Operation, Schema
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
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    request_schema,
)
from flambeau.frontend.openai.responses import Work
from flambeau.frontend.openai.scores import create_classify, create_rerank, create_score
from flambeau.frontend.openai.tokenization import create_text, create_tokens
from flambeau.serving.server import Server

Create = Callable[[Server, Exchange], Work]
POST: dict[tuple[str, ...], Create] = {
    ("chat", "completions"): create_chat_completion,
    ("completions",): create_completion,
    ("embeddings",): create_embeddings,
    ("rerank",): create_rerank,
    ("score",): create_score,
    ("classify",): create_classify,
}
KSERVE_VERBS = (":predict", ":explain")


def post(server: Server, create: Create, exchange: Exchange) -> Work:
    """A path that takes POST only."""
    if exchange.method == "POST":
        return create(server, exchange)
    if exchange.method == "OPTIONS":
        exchange.respond(200, b"")  # every response has the CORS headers
    else:
        not_allowed(exchange, "POST")
    return None


class OpenAiApi:
    """OpenAI's paths; KServe's first protocol shares /v1 with them, and `others` have a segment below it each."""

    def __init__(
        self, server: Server, kserve_v1: Endpoint, others: Mapping[str, Endpoint] = MappingProxyType({})
    ) -> None:
        self._server = server
        self._others = others
        self._kserve_v1 = kserve_v1

    def routes(self) -> dict[str, Endpoint]:
        return {
            "v1": self.v1,
            "tokenize": partial(self._root, create_tokens),
            "detokenize": partial(self._root, create_text),
        }

    def _root(self, create: Create, exchange: Exchange, segments: list[str]) -> Work:
        """A path of a single segment."""
        if len(segments) > 1:
            not_found(exchange)
            return None
        return post(self._server, create, exchange)

    def v1(self, exchange: Exchange, segments: list[str]) -> Work:
        create = POST.get(tuple(segments[1:]))
        if create is None:
            if (other := self._others.get("".join(segments[1:2]))) is not None:
                return other(exchange, segments)
            if segments[1:2] != ["models"]:
                not_found(exchange)
            elif segments[-1].endswith(KSERVE_VERBS):
                self._kserve_v1(exchange, segments)
            else:
                get_models(self._server, exchange, segments)
        else:
            return post(self._server, create, exchange)
        return None


# ---- the API description ----

STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 507)


def operation(path: str, operation_id: str, summary: str, request: type, error: Schema = OPENAI_ERROR) -> Operation:
    return Operation(
        path=path,
        method="post",
        id=operation_id,
        summary=summary,
        body={"application/json": request_schema(request)},
        errors=STATUSES,
        error=error,
    )


OPERATIONS = [
    operation("/v1/chat/completions", "createChatCompletion", "Answer a chat (OpenAI).", ChatRequest),
    operation("/v1/completions", "createCompletion", "Complete prompts (OpenAI).", CompletionRequest),
    operation("/v1/embeddings", "createEmbedding", "Embed texts (OpenAI).", EmbeddingRequest),
    operation("/tokenize", "tokenize", "The token ids of a prompt or a chat (vLLM).", TokenizeRequest),
    operation("/detokenize", "detokenize", "The text of token ids (vLLM).", DetokenizeRequest),
    operation("/v1/rerank", "createRerank", "Order documents by a query (Cohere, Jina, vLLM).", RerankRequest),
    operation("/v1/score", "createScore", "Score pairs of texts (vLLM).", ScoreRequest),
    operation("/v1/classify", "createClassification", "Classify texts (vLLM).", ClassifyRequest),
]
