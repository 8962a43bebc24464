"""/v1: OpenAI's paths; what is not among them is KServe's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flambeau.frontend.http.app import Endpoint
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.kserve import v1 as kserve_v1
from flambeau.frontend.http.openai.chat import chat
from flambeau.frontend.http.openai.completions import completions
from flambeau.frontend.http.openai.embeddings import embeddings
from flambeau.frontend.http.openai.models import models
from flambeau.frontend.http.openai.wrong_paths import not_allowed, not_found
from flambeau.serving.server import Server

POSTED: dict[tuple[str, ...], Callable[[Server, Exchange], None]] = {
    ("chat", "completions"): chat,
    ("completions",): completions,
    ("embeddings",): embeddings,
}
VERBS = (":predict", ":explain")


def openai_routes(server: Server) -> dict[str, Endpoint]:
    """What the inference listener serves below /v1."""
    return {"v1": partial(v1, server)}


def v1(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """OpenAI's paths, /v1/models, and those of KServe's first protocol."""
    answer = POSTED.get(tuple(segments[1:]))
    if answer is None:
        if segments[1:2] != ["models"]:
            not_found(exchange)
        elif segments[-1].endswith(VERBS):
            kserve_v1(server, exchange, segments)
        else:
            models(server, exchange, segments)
    elif exchange.method == "POST":
        answer(server, exchange)
    elif exchange.method == "OPTIONS":
        exchange.respond(200, b"")  # what a browser wants to know is in the headers of every response
    else:
        not_allowed(exchange, "POST")
