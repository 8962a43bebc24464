"""GET /v1/models, and which model a request means. KServe has the same path, so one document serves both."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec

from flambeau.errors import BadRequest, InvalidField, ModelNotFound
from flambeau.frontend.http.errors import openai_error, respond_json, status_and_type, to_document
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import choose_version
from flambeau.frontend.openai.errors import not_allowed, not_found
from flambeau.serving.model import Model
from flambeau.serving.registry import Registry
from flambeau.serving.server import Server
from flambeau.wire.generation import Adapter, Generate

Ability = Literal["generate", "chat", "tokenize", "embed", "score", "classify", "transcribe", "speak"]

LACKING: dict[Ability, str] = {
    "generate": "generates no text; its handler must be gpt_handler, without an inference or generate of its own, "
    "or another that generates. For what it does answer, use /predictions",
    "chat": "has no chat template; use /v1/completions, or put a chat_template into its tokenizer_config.json",
    "tokenize": "does not tokenize texts for clients; its handler must be gpt_handler, or another that tokenizes",
    "embed": "makes no embeddings; its handler must be sentence_embedder, or another that embeds. "
    "For what it does answer, use /predictions",
    "score": "scores no pairs of texts; it must be a cross-encoder or make embeddings. A language model that ranks is "
    "served by `flambeau serve FOLDER`, not by `flambeau llm serve`, with `handler: {name: transformers, task: "
    "text-ranking, ranking: …}` in its model-config.yaml",
    "classify": "classifies no texts; its handler must be transformers with task: text-classification, or another that "
    "classifies",
    "transcribe": "writes down no speech; its handler must be transformers with task: automatic-speech-recognition, or "
    "another that transcribes",
    "speak": "makes no speech; its handler must be transformers with task: text-to-speech, or another that speaks",
}
NONE = "No model here can answer such a request yet."
READING = frozenset({"GET", "HEAD"})
LISTED_ABILITIES = frozenset({"generate", "embed", "score", "classify", "transcribe", "speak"})


def get_models(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/v1/models and /v1/models/{model}."""
    if len(segments) > 3:
        not_found(exchange)
    elif exchange.method == "OPTIONS":
        exchange.respond(200, b"")  # every response has the CORS headers
    elif exchange.method not in READING:
        not_allowed(exchange, "GET", "HEAD")
    elif len(segments) == 2:
        respond_json(exchange, 200, listed(server, () if exchange.tenant is None else exchange.tenant.limits.models))
    else:
        try:
            respond_json(exchange, 200, one(server, segments[2]))
        except ModelNotFound as error:
            respond_missing(exchange, error)


def listed(server: Server, allowed: Collection[str] = ()) -> dict[str, Any]:
    """`data` for OpenAI's clients: models that generate or embed. `models` for KServe's: the names of all.

    With `allowed`, only those.
    """
    defaults = [model for model in server.registry.defaults() if not allowed or model.name in allowed]
    able = [model for model in defaults if model.is_listed and is_able(model)]
    data = [entry(model, model.name) for model in able]
    data += [adapter_entry(server.registry, model, name) for model in able for name in model.adapters.names]
    return {"object": "list", "data": data, "models": [model.name for model in defaults]}


def one(server: Server, name: str) -> dict[str, Any]:
    """One model; KServe's clients may append a colon and a verb to its name."""
    try:
        model, _ = find_model(server.registry, name, "generate")
    except ModelNotFound:
        if ":" not in name:
            raise
        model = server.registry.find(name.partition(":")[0])
    if (adapter := adapter_of(server.registry, name, model)) is not None:
        return adapter_entry(server.registry, model, adapter.name)
    ready = {"name": model.name, "ready": model.pool.can_answer}
    return {**entry(model, name), **ready} if is_able(model) else ready


def respond_missing(exchange: Exchange, error: ModelNotFound) -> None:
    """Respond 404 in the format of both APIs."""
    status, kind = status_and_type(error)
    both = {"error": openai_error(status, str(error), error)}
    respond_json(exchange, status, to_document(status, kind, str(error), more=both))


def is_able(model: Model) -> bool:
    return model.config.openai and not LISTED_ABILITIES.isdisjoint(model.abilities)


def entry(model: Model, name: str) -> dict[str, Any]:
    made = int(model.registered_at)
    known: dict[str, Any] = {"abilities": sorted(model.abilities)}  # an extension of OpenAI's format
    if model.max_length:
        known["max_model_len"] = model.max_length
    return {"id": name, "object": "model", "created": made, "owned_by": "flambeau", **known}


def adapter_entry(registry: Registry, model: Model, name: str) -> dict[str, Any]:
    """An adapter as a model of its own."""
    adapter = model.adapters.find(name)
    path = adapter.path if adapter is not None else ""
    known = {"root": path or name, "parent": model.name}
    return {**entry(model, adapter_id(registry, model, name)), **known}


def adapter_id(registry: Registry, model: Model, name: str) -> str:
    """The adapter's name; behind that of its model if it is also the name of a model or of another one's adapter."""
    owners = [other for other in registry.defaults() if other.adapters.find(name) is not None]
    is_unique = owners == [model] and all(other.name != name for other in registry.defaults())
    return name if is_unique else f"{model.name}:{name}"


def choose_model(
    registry: Registry, asked: str | None, ability: Ability, *, takes_adapter: bool = False
) -> tuple[Model, str | None]:
    """The model, and the version if the request names one; without a name, the only model with the ability.

    The name may be that of an adapter where the caller takes it; see `adapter_of`.
    """
    if not asked:
        return only_model(registry, ability), None
    model, version = find_model(registry, asked, ability)
    if not takes_adapter and version is None and adapter_of(registry, asked, model) is not None:
        raise InvalidField("model", f"{asked[:200]!r} is an adapter, which this path does not use; name {model.name}.")
    if not model.config.openai:
        raise ModelNotFound(
            f"The model {asked!r} is not at /v1: its model-config.yaml has openai: false. "
            f"Use /predictions/{model.name}."
        )
    # The abilities of a model are unknown until a worker has loaded it.
    if model.pool.has_loaded and ability not in model.abilities:
        lacking = LACKING["generate" if ability == "chat" and "generate" not in model.abilities else ability]
        raise InvalidField("model", f"The model {asked!r} {lacking}.")
    return model, version


def find_model(registry: Registry, asked: str, ability: Ability) -> tuple[Model, str | None]:
    """Find a model by `name`, `name@version` or `name:version`, or by an adapter, as `name:adapter` or `adapter`."""
    try:
        return registry.find(asked), None
    except ModelNotFound:
        pass
    for separator in "@:":
        name, found, version = asked.rpartition(separator)
        if found and version:
            try:
                return registry.find(name, version), version
            except ModelNotFound:
                pass
    if (found_by := with_adapter(registry, asked)) is not None:
        return found_by[0], None
    able = models_with(registry, ability)
    names = ", ".join(model.name for model in able)
    if ability in ("generate", "chat"):  # others do not take adapters
        names = ", ".join([names, *(adapter_id(registry, each, name) for each in able for name in each.adapters.names)])
    raise ModelNotFound(f"The model {asked[:200]!r} does not exist. " + (f"Available: {names}." if names else NONE))


def with_adapter(registry: Registry, asked: str) -> tuple[Model, Adapter] | None:
    """The model whose adapter is asked for, and the adapter; None if there is no such adapter."""
    base, _, name = asked.partition(":")
    found = [(model, adapter) for model in registry.defaults() if (adapter := model.adapters.find(asked)) is not None]
    found += [
        (model, adapter)
        for model in registry.defaults()
        if model.name == base and name and (adapter := model.adapters.find(name)) is not None
    ]
    if len(found) > 1:
        names = ", ".join(f"{model.name}:{adapter.name}" for model, adapter in found)
        raise InvalidField("model", f"Several models have an adapter {asked[:200]!r}; name one of {names}.")
    return found[0] if found else None


def adapter_of(registry: Registry, asked: str | None, model: Model) -> Adapter | None:
    """The adapter that the name of a request means; None: the model itself."""
    if not asked or asked == model.name:
        return None
    try:
        registry.find(asked)
        return None
    except ModelNotFound:
        found = with_adapter(registry, asked)
    return found[1] if found is not None and found[0] is model else None


def with_adapter_of(registry: Registry, asked: str | None, model: Model, request: Generate) -> Generate:
    """The request with the adapter that its model name means."""
    adapter = adapter_of(registry, asked, model)
    return request if adapter is None else msgspec.structs.replace(request, adapter=adapter)


def choose_generator(
    registry: Registry, exchange: Exchange, asked: str | None, ability: Ability, request: Generate
) -> tuple[Model, str | None, Generate]:
    """The model of a generation, the version if one was named or chosen, and the request with its adapter."""
    model, version = choose_model(registry, asked, ability, takes_adapter=True)
    request = with_adapter_of(registry, asked, model, request)
    if request.adapter is not None:  # which belongs to one version
        return model, version or model.version, request
    return *choose_version(exchange, model, version), request


def only_model(registry: Registry, ability: Ability) -> Model:
    models = models_with(registry, ability)
    if len(models) != 1:
        names = ", ".join(model.name for model in models)
        raise InvalidField("model", "model is required. " + (f"Available: {names}." if names else NONE))
    return models[0]


def models_with(registry: Registry, ability: Ability) -> list[Model]:
    """The default versions of the models with an ability."""
    return [
        model for model in registry.defaults() if model.is_listed and model.config.openai and ability in model.abilities
    ]


def check_envelope(model: Model) -> None:
    """Reject a model with an envelope, which would not understand the request."""
    if model.envelope:
        raise BadRequest(
            f"The model {model.name!r} has the envelope {model.envelope!r}, which does not know OpenAI's requests; "
            "register it without one, or use /predictions."
        )
