"""What a state file holds of a model, and how it is read again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.errors import ConfigError
from flambeau.serving.model import Given
from flambeau.serving.model_sources.store import Source
from flambeau.serving.registry import Registry, default_settings
from flambeau.serving.saved_models import FORMAT, SavedModel, given_settings, read_document, to_document, without_query

SAVED = SavedModel(name="m", version="1.0", url="m.mar", min_workers=1, max_workers=2)


def registered(version="1.0", *, name="m", url="m.mar", config=None, downloaded=None, workflow="", **given):
    return SimpleNamespace(
        name=name,
        version=version,
        workflow=workflow,
        config=config or ModelConfig(),
        source=Source(url=url, folder=Path(), manifest=None, downloaded=downloaded),
        given=Given(url=url, **given),
        pool=SimpleNamespace(min_workers=1, max_workers=2),
        mirror=SimpleNamespace(percent=0),
        split=None,
        error_limit=None,
    )


def registry_of(*models):
    registry = Registry()
    for model in models:
        registry.add(model)
    return registry


def test_models_are_read_as_they_were_written():
    config = ModelConfig().updated({"batch_size": 4, "batch_delay_s": 0.05}, "the register call")
    registry = registry_of(
        registered("1.0", config=config, handler="echo"),
        registered("2.0", url="/srv/m2", path=Path("/srv/m2")),
        registered(name="flow__node", workflow="flow"),
    )
    first, second = read_document(to_document(registry))
    assert (first.key, first.url, first.handler, first.is_default) == (("m", "1.0"), "m.mar", "echo", True)
    assert (first.min_workers, first.max_workers, first.batch_size, first.batch_delay_s) == (1, 2, 4, 0.05)
    assert (second.key, second.path, second.is_default, second.batch_size) == (("m", "2.0"), "/srv/m2", False, None)


def test_settings_of_the_yaml_and_of_the_server_are_left_to_them():
    server = SimpleNamespace(default_response_timeout_s=7, default_startup_timeout_s=120, job_queue_size=100)
    config = default_settings(server, workers=1).with_options({"batchSize": 3}, "model-config.yaml of m")
    assert config.origins["response_timeout_s"] == "the setting default_response_timeout"
    assert given_settings(config, "model-config.yaml") == {}
    config = config.updated({"startup_timeout_s": 9}, "the register call")
    assert given_settings(config, "model-config.yaml") == {"startup_timeout_s": 9}


def test_restored_settings_are_saved_again():
    config = ModelConfig().updated(SavedModel(**to_builtins(SAVED), batch_size=5).overrides, "elsewhere")
    assert (config.batch_size, config.min_workers, config.max_workers) == (5, 1, 2)
    assert given_settings(config, "model-config.yaml") == {"batch_size": 5}


def to_builtins(saved):
    return {name: getattr(saved, name) for name in ("name", "version", "url", "min_workers", "max_workers")}


@pytest.mark.parametrize(
    ("url", "saved"),
    [
        ("https://h/m.mar?X-Amz-Signature=secret", "https://h/m.mar"),
        ("HTTPS://h/m.mar?a=b#c", "HTTPS://h/m.mar"),
        ("what?.mar", "what?.mar"),
    ],
)
def test_signatures_of_urls_are_not_kept(url, saved):
    assert without_query(url) == saved


def test_downloaded_models_are_found_by_their_file():
    model = registered(url="https://h/m.mar?sig=secret", downloaded=Path("/store/m.mar"), is_signed=True)
    content = to_document(registry_of(model))
    assert b"secret" not in content
    [saved] = read_document(content)
    assert (saved.path, saved.is_downloaded, saved.is_signed) == ("/store/m.mar", True, True)
    assert saved.location(None) == Path("/store/m.mar")


def test_models_that_were_not_restored_stay_as_they_were():
    lost = SavedModel(name="m", version="0.9", url="old.mar", is_default=True, min_workers=3, max_workers=3)
    saved = read_document(to_document(registry_of(registered("1.0")), [lost]))
    assert [one.version for one in saved] == ["0.9", "1.0"]
    assert saved[0] == lost
    assert not saved[1].is_default  # it only stands in


def text_of(format=FORMAT, times=1, **changes):
    model = {"name": "m", "version": "1.0", "url": "m.mar", "min_workers": 1, "max_workers": 1}
    return json.dumps({"format": format, "models": [model | changes] * times}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (text_of()[:-20], "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        (text_of(min_workers="two"), "min_workers"),
        (text_of(min_workers=-1), "min_workers"),
        (text_of(traffic_percent=101), "traffic_percent"),
        (text_of(name=""), "name"),
        (text_of(more=1), "more"),
        (text_of(times=2), "twice"),
        (text_of(format=FORMAT + 1, more=1), f"has format {FORMAT + 1}"),
    ],
)
def test_files_that_cannot_be_understood_are_refused_with_the_remedy(content, problem):
    with pytest.raises(ConfigError) as error:
        read_document(content)
    assert problem in str(error.value)
    assert any(remedy in str(error.value) for remedy in ("Bring back a copy", "start the version that wrote it"))
