from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flambeau.config.properties import parse, read_properties, to_properties
from flambeau.config.server import Address, ServerConfig
from flambeau.errors import ConfigError


def test_javas_format_is_read(monkeypatch):
    monkeypatch.setenv("MY_STORE", "/models")
    text = (
        "# a comment\n! another\n\na=1\nb : 2\nc 3\n  d=with\\\n    continuation\ne=\\u0041\\t\\=x\n"
        "f=$$MY_STORE$$/x\ng=\nkey\\ with\\:odd=v=w\n"
    )
    assert parse(text) == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d": "withcontinuation",
        "e": "A\t=x",
        "f": "/models/x",
        "g": "",
        "key with:odd": "v=w",
    }


def test_missing_variable_is_named():
    with pytest.raises(ConfigError, match="Invalid Environment Variable NOT_SET_ANYWHERE"):
        parse("a=$$NOT_SET_ANYWHERE$$")


def test_keys_become_settings(tmp_path):
    file = tmp_path / "config.properties"
    file.write_text(
        "inference_address=http://127.0.0.1:18080\nmanagement_address=http://0.0.0.0\nenable_metrics_api=false\n"
        "model_store=/models\njob_queue_size=1000\nmax_request_size=7\ndefault_workers_per_model=3\nload_models=a.mar\n"
    )
    properties = read_properties(file, ServerConfig())
    server = properties.server
    assert server.inference == Address("127.0.0.1", 18080)
    assert server.management == Address("0.0.0.0", 8081)
    assert server.metrics is None
    assert (server.model_store, server.job_queue_size, server.max_request_bytes) == (Path("/models"), 1000, 7)
    assert (properties.default_workers, properties.load_models) == (3, "a.mar")


def test_unknown_keys_are_named_with_the_nearest_known_one(caplog):
    with caplog.at_level(logging.INFO):
        to_properties({"job_queue_sise": "1", "vmargs": "-Xmx1g"}, ServerConfig())
    assert "did you mean job_queue_size?" in caplog.text
    assert "vmargs has no effect here" in caplog.text


def test_numbers_that_are_none_stop_the_server():
    with pytest.raises(ConfigError, match="job_queue_size must be a whole number, not 'many'"):
        to_properties({"job_queue_size": "many"}, ServerConfig())


def test_envelope_of_all_models_is_read(caplog):
    assert to_properties({"service_envelope": "kserve"}, ServerConfig()).server.service_envelope == "kserve"
    assert "no effect" not in caplog.text
