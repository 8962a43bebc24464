from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.errors import BadRequest, DefaultVersionInUse, ModelExists, ModelNotFound, VersionNotFound
from flambeau.serving.registry import Registry, check_name


@pytest.fixture
def registry():
    registry = Registry()
    for name, version in (("b", "1"), ("b", "2"), ("a", "1")):
        registry.add(SimpleNamespace(name=name, version=version))
    return registry


def test_first_version_is_the_default(registry):
    assert registry.find("b").version == "1"
    assert [model.name for model in registry.defaults()] == ["a", "b"]


def test_what_is_missing_is_named(registry):
    with pytest.raises(ModelNotFound, match="Model not found: c"):
        registry.find("c")
    with pytest.raises(VersionNotFound, match="Model version: 9 does not exist for model: b"):
        registry.find("b", "9")


def test_version_cannot_be_registered_twice(registry):
    with pytest.raises(ModelExists, match="Model version 1 is already registered for model a"):
        registry.add(SimpleNamespace(name="a", version="1"))


def test_default_version_goes_last(registry):
    with pytest.raises(DefaultVersionInUse):
        registry.remove("b")
    registry.remove("b", "1", even_default=True)
    assert registry.find("b").version == "2"
    registry.add(SimpleNamespace(name="b", version="1"))
    registry.remove("b", "1")
    registry.remove("b")
    with pytest.raises(ModelNotFound):
        registry.find("b")


def test_only_the_very_model_is_discarded(registry):
    registry.discard(SimpleNamespace(name="a", version="1"))
    assert registry.find("a")
    registry.discard(registry.find("a"))
    with pytest.raises(ModelNotFound):
        registry.find("a")
    default = registry.find("b")
    registry.discard(default)
    registry.discard(default)
    assert registry.find("b").version == "2"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\x00", "a\u2028b"])
def test_names_hold_no_control_characters(name):
    with pytest.raises(BadRequest, match="may hold no control characters"):
        check_name(name)
    check_name("Größe 模型-1.0")
