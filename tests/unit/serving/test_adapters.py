"""Which adapters a model has."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from flambeau.errors import BadRequest
from flambeau.serving import adapters
from flambeau.serving.adapters import AdapterTable, load_adapter, unload_adapter
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


def test_the_log_has_a_line_for_each_change(monkeypatch, caplog):
    async def change(model, workers, what):
        if what.adapter.path == "/bad":
            raise BadRequest("no adapter")

    monkeypatch.setattr(adapters, "change", change)
    worker = SimpleNamespace(is_ready=True, is_retiring=False)
    model = SimpleNamespace(name="base", adapters=AdapterTable(), pool=SimpleNamespace(workers=[worker]))
    with caplog.at_level(logging.INFO, logger="flambeau.serving.adapters"):
        asyncio.run(load_adapter(model, "sql", "/sql"))
        with pytest.raises(BadRequest):
            asyncio.run(load_adapter(model, "other", "/bad"))
        asyncio.run(unload_adapter(model, "sql"))
    assert caplog.messages == [
        "model base has loaded the adapter sql from /sql",
        "model base has unloaded the adapter sql",
    ]
