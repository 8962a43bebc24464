"""GET /v1/models: OpenAI's list and KServe's in one document, since both have this path."""

from __future__ import annotations

from typing import Any

from flambeau.errors import ModelNotFound
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openai.choosing import find
from flambeau.frontend.http.openai.problems import openai_error
from flambeau.frontend.http.openai.wrong_paths import not_allowed, not_found
from flambeau.frontend.http.problems import respond_json, status_and_type, to_document
from flambeau.serving.model import Model
from flambeau.serving.server import Server

READING = frozenset({"GET", "HEAD"})
ABLE = frozenset({"generate", "embed"})


def models(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/v1/models and /v1/models/{model}."""
    if len(segments) > 3:
        not_found(exchange)
    elif exchange.method == "OPTIONS":
        exchange.respond(200, b"")  # what a browser wants to know is in the headers of every response
    elif exchange.method not in READING:
        not_allowed(exchange, "GET", "HEAD")
    elif len(segments) == 2:
        respond_json(exchange, 200, listed(server))
    else:
        try:
            respond_json(exchange, 200, one(server, segments[2]))
        except ModelNotFound as error:
            respond_missing(exchange, error)


def listed(server: Server) -> dict[str, Any]:
    """Models that generate or embed as OpenAI's clients read them, and the names of all as KServe's do."""
    defaults = server.registry.defaults()
    data = [entry(model, model.name) for model in defaults if model.is_listed and is_able(model)]
    return {"object": "list", "data": data, "models": [model.name for model in defaults]}


def one(server: Server, name: str) -> dict[str, Any]:
    """One model; to KServe, what follows a colon is nothing to look at."""
    try:
        model, _ = find(server.registry, name, "generate")
    except ModelNotFound:
        if ":" not in name:
            raise
        model = server.registry.find(name.partition(":")[0])
    ready = {"name": model.name, "ready": model.pool.can_answer}
    return {**entry(model, name), **ready} if is_able(model) else ready


def respond_missing(exchange: Exchange, error: ModelNotFound) -> None:
    """Answer that there is no such model, so that clients of either API understand it."""
    status, kind = status_and_type(error)
    both = {"error": openai_error(status, str(error), error)}
    respond_json(exchange, status, to_document(status, kind, str(error), more=both))


def is_able(model: Model) -> bool:
    """Whether OpenAI's clients have any use for a model."""
    return model.config.openai and not ABLE.isdisjoint(model.abilities)


def entry(model: Model, name: str) -> dict[str, Any]:
    """A model as OpenAI's clients read it."""
    made = int(model.registered_at)
    known: dict[str, Any] = {"abilities": sorted(model.abilities)}  # these are ours
    if model.max_length:
        known["max_model_len"] = model.max_length
    return {"id": name, "object": "model", "created": made, "owned_by": "flambeau", **known}
