"""Which model a request means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.errors import BadRequest, InvalidField, ModelNotFound
from flambeau.frontend.openai.models import adapter_entry, adapter_of, check_envelope, choose_model
from flambeau.serving.adapters import AdapterTable


def model(name, *abilities, version="1.0", openai=True, has_loaded=True, envelope="", adapters=()):
    table = AdapterTable()
    table.configure(adapters)
    return SimpleNamespace(
        name=name,
        adapters=table,
        registered_at=0.0,
        max_length=0,
        version=version,
        abilities={*abilities},
        pool=SimpleNamespace(has_loaded=has_loaded),
        is_listed=True,
        envelope=envelope,
        config=SimpleNamespace(openai=openai),
    )


class Registry:
    def __init__(self, *models):
        self.models = models

    def find(self, name, version=None):
        for one in self.models:
            if one.name == name and version in (None, one.version):
                return one
        raise ModelNotFound(name)

    def defaults(self):
        return self.models


LLAMA = model("llama", "generate", "chat")
PLAIN = model("plain", "generate")
BERT = model("bert", "embed")
REGISTRY = Registry(LLAMA, PLAIN, BERT)


@pytest.mark.parametrize(
    ("name", "version"), [("llama", None), ("llama@1.0", "1.0"), ("llama:1.0", "1.0"), ("", None), (None, None)]
)
def test_a_model_is_chosen_by_name_and_version_or_because_it_is_the_only_one(name, version):
    assert choose_model(REGISTRY, name, "chat") == (LLAMA, version)


@pytest.mark.parametrize(
    ("name", "ability", "reason"),
    [
        (None, "generate", "model is required. Available: llama, plain."),
        ("bert", "chat", "generates no text"),
        ("plain", "chat", "has no chat template"),
        ("plain", "embed", "makes no embeddings"),
    ],
)
def test_a_model_without_the_ability_is_rejected(name, ability, reason):
    with pytest.raises(InvalidField, match=reason) as found:
        choose_model(REGISTRY, name, ability)
    assert found.value.field == "model"


def test_an_unknown_model_is_not_found_and_the_others_are_named():
    with pytest.raises(ModelNotFound, match=r"'lama' does not exist\. Available: llama, plain"):
        choose_model(REGISTRY, "lama", "generate")
    with pytest.raises(ModelNotFound, match="No model here can answer"):
        choose_model(Registry(), "lama", "generate")
    with pytest.raises(ModelNotFound) as found:
        choose_model(ADAPTERS, "slq", "generate")
    names = "llama, adapted, other, adapted:both, adapted:llama, sql, other:both"
    assert str(found.value) == f"The model 'slq' does not exist. Available: {names}."


def test_a_model_that_is_not_served_at_v1_is_not_found():
    with pytest.raises(ModelNotFound, match="Use /predictions/private"):
        choose_model(Registry(model("private", "generate", openai=False)), "private", "generate")


def test_a_model_that_no_worker_has_loaded_yet_may_have_the_ability():
    new = model("new", has_loaded=False)
    assert choose_model(Registry(new), "new", "chat") == (new, None)


def test_a_model_with_an_envelope_is_rejected():
    check_envelope(BERT)
    with pytest.raises(BadRequest, match="'body'"):
        check_envelope(model("m", envelope="body"))


ADAPTED = model("adapted", "generate", "chat", adapters=["sql", "both", "llama"])
OTHER = model("other", "generate", adapters=["both"])
ADAPTERS = Registry(LLAMA, ADAPTED, OTHER)


@pytest.mark.parametrize(
    ("name", "base", "adapter"),
    [
        ("sql", ADAPTED, "sql"),
        ("adapted:sql", ADAPTED, "sql"),
        ("other:both", OTHER, "both"),
        ("llama", LLAMA, None),  # models come first
        ("adapted:llama", ADAPTED, "llama"),
        ("adapted:1.0", ADAPTED, None),
        ("adapted", ADAPTED, None),
    ],
)
def test_an_adapter_is_named_alone_or_with_its_model(name, base, adapter):
    found, _ = choose_model(ADAPTERS, name, "generate", takes_adapter=True)
    assert found is base
    meant = adapter_of(ADAPTERS, name, found)
    assert (meant.name if meant else None) == adapter


def test_an_adapter_of_several_models_needs_the_name_of_one():
    with pytest.raises(InvalidField, match="adapted:both, other:both"):
        choose_model(ADAPTERS, "both", "generate", takes_adapter=True)
    assert adapter_entry(ADAPTERS, OTHER, "both")["id"] == "other:both"
    assert adapter_entry(ADAPTERS, ADAPTED, "llama")["id"] == "adapted:llama"
    assert adapter_entry(ADAPTERS, ADAPTED, "sql")["id"] == "sql"
    alike = model("alike", "generate", adapters=["alike"])
    assert adapter_entry(Registry(alike), alike, "alike")["id"] == "alike:alike"


def test_where_adapters_have_no_effect_they_are_refused():
    with pytest.raises(InvalidField, match="is an adapter"):
        choose_model(ADAPTERS, "sql", "generate")
