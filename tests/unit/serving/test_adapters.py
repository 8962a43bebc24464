"""Which adapters a model has."""

from __future__ import annotations

from flambeau.serving.adapters import AdapterTable
from flambeau.wire.generation import Adapter


def test_adapters_of_the_settings_are_those_that_a_worker_reports():
    table = AdapterTable()
    assert table.names == []
    table.configure(["b", "a"])
    assert table.names == ["a", "b"]
    assert table.find("a") == Adapter("a")
    assert table.find("c") is None


def test_adapters_of_a_model_that_sleeps_are_known_from_its_settings():
    assert AdapterTable({"handler": {"lora_adapters": {"a": "/a"}}}).names == ["a"]
    assert AdapterTable({"lora_adapters": {"a": "/a"}}).names == ["a"]
    assert AdapterTable({"handler": "gpt_handler"}).names == AdapterTable({"handler": {"lora_adapters": 3}}).names == []


def test_an_adapter_loaded_again_under_its_name_is_another_one():
    table = AdapterTable()
    first = table.new("a", "/one")
    assert table.find("a") is None  # until all workers have it
    table.add(first)
    assert table.find("a") == first
    table.remove("a")
    assert table.find("a") is None
    table.add(table.new("a", "/one"))
    assert table.find("a").key != first.key


def test_an_adapter_of_the_settings_that_was_unloaded_stays_so_when_a_worker_starts():
    table = AdapterTable()
    table.configure(["a"])
    table.remove("a")
    table.configure(["a"])
    assert table.names == []
    table.add(table.new("a", "/new"))
    assert table.find("a").path == "/new"
