"""KServe's protocols: the first (/v1) and the second (/v2, the Open Inference Protocol), for any model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flambeau import __version__
from flambeau.frontend.http import describe
from flambeau.frontend.http.app import Endpoint, not_allowed, not_found
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.http.problems import JSON_TYPE, respond_json
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Kind, Part

READING = frozenset({"GET", "HEAD"})
VERBS: dict[str, Kind] = {"predict": "predict", "infer": "predict", "explain": "explain"}
EXTENSIONS = ["kserve", "kubeflow", "binary_tensor_data", "model_repository"]
# A model that has an envelope gets its requests as they are. One that has none gets the protocol's.
V1_ENVELOPES = {"": "instances"}
V2_ENVELOPES = {"": "open_inference"}


def kserve_routes(server: Server) -> dict[str, Endpoint]:
    """What the inference listener serves of KServe's protocols."""
    return {"v1": partial(v1, server), "v2": partial(v2, server)}  # OpenAI's API is before this one at /v1


def readiness_routes(server: Server) -> dict[str, Endpoint]:
    """What the management listener serves of them: whether models are ready."""
    return {"v1": partial(v1_models, server)}


# ---- the first protocol ----


def v1(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/v1/models/{model}:predict and :explain, and whether a model is ready."""
    name, colon, verb = (segments[2] if len(segments) == 3 else "").rpartition(":")
    if segments[1:2] == ["models"] and colon and verb in ("predict", "explain"):
        run(server, exchange, server.registry.find(name), None, VERBS[verb], V1_ENVELOPES)
    else:
        v1_models(server, exchange, segments)


def v1_models(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/v1/models and /v1/models/{model}; what follows a colon is not looked at."""
    if segments[1:2] != ["models"] or len(segments) > 3:
        not_found(exchange)
    elif exchange.method not in READING:
        not_allowed(exchange)
    elif len(segments) == 2:
        respond_json(exchange, 200, {"models": [model.name for model in server.registry.defaults()]})
    else:
        model = server.registry.find(segments[2].partition(":")[0])
        respond_json(exchange, 200, {"name": model.name, "ready": model.pool.can_answer})


# ---- the second ----


def v2(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/v2, /v2/health/…, /v2/repository/index and /v2/models/{model}[/versions/{version}][/…]."""
    if segments[1:2] == ["models"] and len(segments) > 2:
        v2_model(server, exchange, segments[2:])
        return
    respond = V2_SERVER.get("/".join(segments[1:])) if server.config.open_inference else None
    if respond is None:
        not_found(exchange)
    elif exchange.method == "OPTIONS":
        exchange.respond(200, b"")
    else:
        respond(server, exchange)


def v2_model(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """What is below /v2/models."""
    name, *rest = segments
    version = None
    if rest[:1] == ["versions"] and len(rest) > 1:
        version, rest = rest[1], rest[2:]
    verb = rest[0] if len(rest) == 1 else ""
    if len(rest) > 1 or verb not in ("", "ready", "infer", "explain"):
        not_found(exchange)
        return
    model = server.registry.find(name, version)
    if verb in VERBS:
        run(server, exchange, model, version, VERBS[verb], V2_ENVELOPES)
    elif not server.config.open_inference:
        not_found(exchange)
    elif exchange.method not in READING:
        not_allowed(exchange)
    elif verb == "ready":
        ready = model.pool.can_answer
        respond_json(exchange, 200 if ready else 503, {"name": model.name, "ready": ready})
    else:
        respond_json(exchange, 200, metadata(server, model))


def metadata(server: Server, model: Model) -> dict[str, Any]:
    """A model as the protocol describes it; handlers do not declare their tensors."""
    versions = [other.version for other in server.registry.versions(model.name)]
    return {"name": model.name, "versions": versions, "platform": "pytorch", "inputs": [], "outputs": []}


def v2_metadata(server: Server, exchange: Exchange) -> None:
    """GET /v2: this server. One key is misspelt as in TorchServe, for those who read it."""
    document = {
        "name": "Torchserve",
        "version": __version__,
        "extenstion": EXTENSIONS[:2],  # codespell:ignore extenstion
        "extensions": EXTENSIONS,
    }
    respond_json(exchange, 200, document)


def v2_live(server: Server, exchange: Exchange) -> None:
    """GET /v2/health/live."""
    respond_json(exchange, 200, {"live": True})


def v2_ready(server: Server, exchange: Exchange) -> None:
    """GET /v2/health/ready: whether every model answers."""
    respond_json(exchange, 200 if server.is_ready else 503, {"ready": server.is_ready})


def v2_index(server: Server, exchange: Exchange) -> None:
    """POST /v2/repository/index: every version of every model, and its state."""
    respond_json(exchange, 200, [index_entry(model) for model in server.registry])


def index_entry(model: Model) -> dict[str, str]:
    """One model in the index of the repository."""
    state = "READY" if model.pool.can_answer else "LOADING" if model.pool.may_recover else "UNAVAILABLE"
    death = model.pool.last_exit
    reason = death.reason if death and state != "READY" else ""
    return {"name": model.name, "version": model.version, "state": state, "reason": reason}


V2_SERVER: dict[str, Callable[[Server, Exchange], None]] = {
    "": v2_metadata,
    "health/live": v2_live,
    "health/ready": v2_ready,
    "repository/index": v2_index,
}


# ---- both ----


def run(
    server: Server, exchange: Exchange, model: Model, version: str | None, kind: Kind, envelopes: dict[str, str]
) -> None:
    """Predict or explain; any method but OPTIONS runs the model."""
    if exchange.method == "OPTIONS":
        respond_json(exchange, 200, describe.model_document(model.name))
        return
    reply = KServeReply(exchange, model, server.config.tells_details)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=exchange.headers,
        body=exchange.take_body(),
        arrived=exchange.arrived,
        kind=kind,
        envelope=envelopes.get(model.envelope, ""),
    )
    submit(reply, job, version)


class KServeReply(Prediction):
    """A prediction whose content type is always told; JSON unless the handler says otherwise."""

    __slots__ = ()

    def on_parts(self, parts: list[Part]) -> None:
        """Send parts, the first with a content type."""
        if not self.exchange.is_started:
            headers: list[Header] = parts[0].headers or []
            if not any(name.lower() == "content-type" for name, _ in headers):
                first = parts[0]
                parts[0] = Part(first.job_id, first.body, first.last, first.status, first.phrase, [*headers, JSON_TYPE])
        super().on_parts(parts)
