"""KServeApi: KServe's first protocol (/v1) and its second (/v2, the Open Inference Protocol), for any model."""

from __future__ import annotations

from typing import Any

from flambeau import __version__
from flambeau.frontend.http.api_descriptions import model_document
from flambeau.frontend.http.bodies import bytes_of
from flambeau.frontend.http.errors import JSON_TYPE, respond_json
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.http.router import Endpoint, not_allowed, not_found
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Kind, Part, TensorSpec, header

READING = frozenset({"GET", "HEAD"})
VERBS: dict[str, Kind] = {"predict": "predict", "infer": "predict", "explain": "explain"}
PLATFORMS = {"onnx": "onnx", "transformers": "transformers"}  # handler → what computes its models; torch otherwise
MAX_BLANKS = 64  # before the brace of a JSON object
EXTENSIONS = ["kserve", "kubeflow", "binary_tensor_data", "model_repository"]
# A model without an envelope gets the protocol's; one with an envelope keeps its own.
V1_ENVELOPES = {"": "instances"}
V2_ENVELOPES = {"": "open_inference"}
LISTS = {"instances": b'"instances"', "open_inference": b'"inputs"'}  # the key that each of them needs


class KServeApi:
    """Both protocols of the inference listener, and the readiness of models for the management listener."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._style = server.config.error_style
        self._strict = server.config.strict_calls
        self._v2_server = {
            "": self.v2_metadata,
            "health/live": self.v2_live,
            "health/ready": self.v2_ready,
            "repository/index": self.v2_index,
        }

    def routes(self) -> dict[str, Endpoint]:
        return {"v1": self.v1, "v2": self.v2}

    # ---- the first protocol ----

    def v1(self, exchange: Exchange, segments: list[str]) -> None:
        """/v1/models/{model}:predict and :explain, and the paths of `v1_models`."""
        name, colon, verb = (segments[2] if len(segments) == 3 else "").rpartition(":")
        if segments[1:2] == ["models"] and colon and verb in ("predict", "explain"):
            self.run(exchange, self._server.registry.find(name), None, VERBS[verb], V1_ENVELOPES)
        else:
            self.v1_models(exchange, segments)

    def v1_models(self, exchange: Exchange, segments: list[str]) -> None:
        """/v1/models and /v1/models/{model}; a colon and what follows it are ignored."""
        registry = self._server.registry
        if segments[1:2] != ["models"] or len(segments) > 3:
            not_found(exchange)
        elif exchange.method not in READING:
            not_allowed(exchange)
        elif len(segments) == 2:
            respond_json(exchange, 200, {"models": [model.name for model in registry.defaults()]})
        else:
            model = registry.find(segments[2].partition(":")[0])
            respond_json(exchange, 200, {"name": model.name, "ready": model.pool.can_answer})

    # ---- the second ----

    def v2(self, exchange: Exchange, segments: list[str]) -> None:
        """/v2, /v2/health/…, /v2/repository/index and /v2/models/{model}[/versions/{version}][/…]."""
        if segments[1:2] == ["models"] and len(segments) > 2:
            self.v2_model(exchange, segments[2:])
            return
        respond = self._v2_server.get("/".join(segments[1:])) if self._server.config.open_inference else None
        if respond is None:
            not_found(exchange)
        elif exchange.method == "OPTIONS":
            exchange.respond(200, b"")
        else:
            respond(exchange)

    def v2_model(self, exchange: Exchange, segments: list[str]) -> None:
        """The paths below /v2/models."""
        name, *rest = segments
        version = None
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        verb = rest[0] if len(rest) == 1 else ""
        if len(rest) > 1 or verb not in ("", "ready", "infer", "explain"):
            not_found(exchange)
            return
        model = self._server.registry.find(name, version)
        if verb in VERBS:
            self.run(exchange, model, version, VERBS[verb], V2_ENVELOPES)
        elif not self._server.config.open_inference:
            not_found(exchange)
        elif exchange.method not in READING:
            not_allowed(exchange)
        elif verb == "ready":
            ready = model.pool.can_answer
            respond_json(exchange, 200 if ready else 503, {"name": model.name, "ready": ready})
        else:
            respond_json(exchange, 200, metadata(self._server, model))

    def v2_metadata(self, exchange: Exchange) -> None:
        """GET /v2. One key is misspelled, since existing clients read it so."""
        document = {
            "name": self._server.config.server_name,
            "version": __version__,
            "extenstion": EXTENSIONS[:2],  # codespell:ignore extenstion
            "extensions": EXTENSIONS,
        }
        respond_json(exchange, 200, document)

    def v2_live(self, exchange: Exchange) -> None:
        """GET /v2/health/live."""
        respond_json(exchange, 200, {"live": True})

    def v2_ready(self, exchange: Exchange) -> None:
        """GET /v2/health/ready: whether every model can answer."""
        ready = self._server.is_ready
        respond_json(exchange, 200 if ready else 503, {"ready": ready})

    def v2_index(self, exchange: Exchange) -> None:
        """POST /v2/repository/index: every version of every model, and its state."""
        respond_json(exchange, 200, [index_entry(model) for model in self._server.registry])

    # ---- both ----

    def run(self, exchange: Exchange, model: Model, version: str | None, kind: Kind, envelopes: dict[str, str]) -> None:
        """Predict or explain, with any method; OPTIONS describes the model."""
        if exchange.method == "OPTIONS":
            respond_json(exchange, 200, model_document(model.name))
            return
        envelope = envelopes.get(model.envelope, "")
        is_document = self._strict or not envelope or has_key(exchange, LISTS[envelope])
        reply = (KServeReply if is_document else Prediction)(exchange, model, self._style)
        job = Job(
            reply,
            request_id=exchange.request_id,
            headers=exchange.headers,
            body=exchange.take_body(),
            arrived=exchange.arrived,
            kind=kind,
            envelope=envelope if is_document else "",
        )
        submit(reply, job, version)


def has_key(exchange: Exchange, key: bytes) -> bool:
    """Whether a body can be a JSON object with this key; other bodies are for the handler alone."""
    body = exchange.body
    if body is None:
        return False
    content = body.content if body.segment is None else body.segment.memory
    return bytes(content[:MAX_BLANKS]).lstrip()[:1] == b"{" and key in bytes_of(exchange)


def metadata(server: Server, model: Model) -> dict[str, Any]:
    """A model as the protocol describes it; its tensors if its handler declares them."""
    return {
        "name": model.name,
        "versions": [other.version for other in server.registry.versions(model.name)],
        "platform": platform_of(server, model),
        "inputs": [describe_tensor(spec) for spec in model.inputs],
        "outputs": [describe_tensor(spec) for spec in model.outputs],
    }


def platform_of(server: Server, model: Model) -> str:
    """What computes a model, as `<project>_<format>`; under another server's name, the only word it has."""
    if server.config.server_name != "flambeau":
        return "pytorch"
    return f"flambeau_{PLATFORMS.get(model.handler, 'pytorch')}"


def describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def index_entry(model: Model) -> dict[str, str]:
    state = "READY" if model.pool.can_answer else "LOADING" if model.pool.may_recover else "UNAVAILABLE"
    death = model.pool.last_exit
    reason = death.reason if death and state != "READY" else ""
    return {"name": model.name, "version": model.version, "state": state, "reason": reason}


class KServeReply(Prediction):
    """A prediction that always has a content type; JSON unless the handler sets another."""

    __slots__ = ()

    def on_parts(self, parts: list[Part]) -> None:
        if not self.exchange.is_started:
            headers: list[Header] = parts[0].headers or []
            if header(headers, "content-type") is None:
                first = parts[0]
                body = first.body + b"\n" if first.last and self.style.is_plain else first.body
                parts[0] = Part(first.job_id, body, first.last, first.status, first.phrase, [*headers, JSON_TYPE])
        super().on_parts(parts)
