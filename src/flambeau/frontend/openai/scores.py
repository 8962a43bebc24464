"""POST /v1/rerank, /v1/score and /v1/classify, as vLLM has them (Cohere's and Jina's clients know the first)."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import msgspec

from flambeau.errors import InvalidField
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.embeddings import texts_of
from flambeau.frontend.openai.pooling import submit_pooled, usage_of
from flambeau.frontend.openai.priorities import apply_priority
from flambeau.frontend.openai.requests import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest, read_request
from flambeau.serving.server import Server

MAX_PAIRS = 10_000


class Scored(msgspec.Struct):
    """A handler's reply to pairs of texts."""

    scores: list[float]
    num_tokens: int


class TextClass(msgspec.Struct):
    """The likeliest class of a text, and the probabilities of all."""

    label: str
    probs: list[float]


class Classified(msgspec.Struct):
    """A handler's reply to texts."""

    classes: list[TextClass]
    num_tokens: int


_decode_scores = msgspec.json.Decoder(Scored).decode
_decode_classes = msgspec.json.Decoder(Classified).decode
SCORES = 'scores: it must return {"scores": [...], "num_tokens": ...} for a request with "pairs"'
CLASSES = (
    'classifies: it must return {"classes": [{"label": ..., "probs": [...]}], "num_tokens": ...} for a request with '
    '"usage": true'
)


def create_rerank(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), RerankRequest)
    apply_priority(exchange, request.priority)
    texts = documents_of(request)
    shows = request.return_documents is not False
    write = partial(to_ranking, texts=texts, top_n=request.top_n or len(texts), shows_texts=shows)
    pairs = [(request.query, text) for text in texts]
    submit_pooled(server, exchange, request.model, "score", pair_request(request, pairs), write, expected=SCORES)


def create_score(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), ScoreRequest)
    apply_priority(exchange, request.priority)
    handler_request = pair_request(request, pairs_of(request))
    submit_pooled(server, exchange, request.model, "score", handler_request, to_scores, expected=SCORES)


def create_classify(server: Server, exchange: Exchange) -> None:
    request = read_request(take_bytes(exchange), ClassifyRequest)
    apply_priority(exchange, request.priority)
    parameters = {"usage": True, "truncation": truncates(request)}
    handler_request = {"inputs": texts_of(request.input), "parameters": parameters}
    submit_pooled(server, exchange, request.model, "classify", handler_request, to_classes, expected=CLASSES)


# ---- requests ----


def documents_of(request: RerankRequest) -> list[str]:
    if not request.documents:
        raise InvalidField("documents", "documents must not be empty; send a list of texts")
    return [document_text(one, i) for i, one in enumerate(request.documents)]


def document_text(document: Any, index: int) -> str:
    """A document is text, or an object with it."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise InvalidField("documents", f'documents[{index}] must be text or {{"text": "…"}}')
    return text


def pairs_of(request: ScoreRequest) -> list[tuple[str, str]]:
    """One text with each of several, or texts two by two."""
    first, second = texts_of(request.text_1, "text_1"), texts_of(request.text_2, "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidField(
            "text_1", f"text_1 has {len(first)} texts and text_2 {len(second)}; text_1 must be one text, or as many"
        )
    return [*zip(first, second, strict=True)]


def pair_request(request: RerankRequest | ScoreRequest, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    if len(pairs) > MAX_PAIRS:
        raise InvalidField("documents", f"{len(pairs)} pairs of texts are too many; send at most {MAX_PAIRS} at once")
    document: dict[str, Any] = {"pairs": pairs, "truncation": truncates(request)}
    return document if request.instruction is None else {**document, "instruction": request.instruction}


def truncates(request: PoolingRequest) -> bool:
    """Whether long texts are cut at the model's limit; otherwise they are an error."""
    if request.truncate_prompt_tokens not in (None, -1):
        raise InvalidField("truncate_prompt_tokens", "truncate_prompt_tokens may only be -1: the limit of the model")
    return request.truncate_prompt_tokens == -1


# ---- responses ----


def head(prefix: str, model: str) -> dict[str, Any]:
    reply_id = f"{prefix}-{random.getrandbits(128):032x}"  # unique, not secret
    return {"id": reply_id, "object": "list", "created": int(time.time()), "model": model}


def to_ranking(
    body: bytes, model: str, *, texts: list[str], top_n: int, shows_texts: bool
) -> tuple[dict[str, Any], int]:
    """The best documents first; equal ones keep their order."""
    scored = _decode_scores(body)
    if len(scored.scores) != len(texts):
        raise msgspec.ValidationError(f"{len(scored.scores)} scores for {len(texts)} pairs")
    order = sorted(range(len(texts)), key=lambda i: -scored.scores[i])[:top_n]
    results = [
        {"index": i, **({"document": {"text": texts[i]}} if shows_texts else {}), "relevance_score": scored.scores[i]}
        for i in order
    ]
    top = head("rerank", model)
    document = {"id": top["id"], "model": model, "usage": usage_of(scored.num_tokens), "results": results}
    return document, scored.num_tokens


def to_scores(body: bytes, model: str) -> tuple[dict[str, Any], int]:
    scored = _decode_scores(body)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scored.scores)]
    return {**head("score", model), "data": data, "usage": usage_of(scored.num_tokens)}, scored.num_tokens


def to_classes(body: bytes, model: str) -> tuple[dict[str, Any], int]:
    found = _decode_classes(body)
    data = [
        {"index": i, "label": one.label, "probs": one.probs, "num_classes": len(one.probs)}
        for i, one in enumerate(found.classes)
    ]
    return {**head("classify", model), "data": data, "usage": usage_of(found.num_tokens)}, found.num_tokens
