"""Which model a request means, and whether that model can do what is asked."""

from __future__ import annotations

from typing import Literal

from flambeau.errors import BadRequest, InvalidField, ModelNotFound
from flambeau.serving.model import Model
from flambeau.serving.registry import Registry

Ability = Literal["generate", "chat", "embed"]

LACKING: dict[Ability, str] = {
    "generate": "generates no text; its handler must be gpt_handler, without an inference or generate of its own, "
    "or another that generates. For what it does answer, use /predictions",
    "chat": "has no chat template; use /v1/completions, or put a chat_template into its tokenizer_config.json",
    "embed": "makes no embeddings; its handler must be sentence_embedder, or another that embeds. "
    "For what it does answer, use /predictions",
}


def choose(registry: Registry, asked: str | None, ability: Ability) -> tuple[Model, str | None]:
    """The model that a request names, and the version if it names one; without a name, the only one that can."""
    if not asked:
        return the_only(registry, ability), None
    model, version = find(registry, asked, ability)
    if not model.config.openai:
        raise ModelNotFound(
            f"The model {asked!r} is not at /v1: its model-config.yaml says openai: false. "
            f"Use /predictions/{model.name}."
        )
    # A model that has never been loaded may turn out to be able; its worker will tell.
    if model.pool.has_loaded and ability not in model.abilities:
        lacking = LACKING["generate" if ability == "chat" and "generate" not in model.abilities else ability]
        raise InvalidField("model", f"The model {asked!r} {lacking}.")
    return model, version


def find(registry: Registry, asked: str, ability: Ability) -> tuple[Model, str | None]:
    """A model by `name`, `name@version` or `name:version`."""
    try:
        return registry.find(asked), None
    except ModelNotFound:
        pass
    for sign in "@:":
        name, found, version = asked.rpartition(sign)
        if found and version:
            try:
                return registry.find(name, version), version
            except ModelNotFound:
                pass
    names = ", ".join(f"{model.name}" for model in able(registry, ability))
    raise ModelNotFound(f"The model {asked[:200]!r} does not exist. " + (f"There is {names}." if names else NONE))


NONE = "No model here can answer such a request yet."


def the_only(registry: Registry, ability: Ability) -> Model:
    """The model of a request that names none."""
    models = able(registry, ability)
    if len(models) != 1:
        names = ", ".join(model.name for model in models)
        raise InvalidField("model", "model is required. " + (f"There is {names}." if names else NONE))
    return models[0]


def able(registry: Registry, ability: Ability) -> list[Model]:
    """The models that can do something, in their default versions."""
    return [
        model for model in registry.defaults() if model.is_listed and model.config.openai and ability in model.abilities
    ]


def check_envelope(model: Model) -> None:
    """Refuse a model whose requests go through an envelope, which would not know ours."""
    if model.envelope:
        raise BadRequest(
            f"The model {model.name!r} has the envelope {model.envelope!r}, which does not know OpenAI's requests; "
            "register it without one, or use /predictions."
        )
