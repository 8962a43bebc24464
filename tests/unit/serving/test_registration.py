"""From the files of a model to a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.archive.manifest import Manifest
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.errors import BadRequest, BrokenArchive, ModelExists, WorkersFailed
from flambeau.serving.model_sources.store import Source
from flambeau.serving.registration import name_from, new_model, settings_of
from flambeau.serving.registry import Registry


@pytest.mark.parametrize(
    ("url", "name"),
    [("a.mar", "a"), ("x/my-model.tar.gz", "my_model"), ("_a.tgz", "_a"), ("https://h/b.1.mar", "b_1")],
)
def test_model_that_nobody_named_is_named_by_its_file(url, name):
    assert name_from(url) == name


def test_overrides_beat_the_models_file_and_that_beats_the_servers(tmp_path):
    (tmp_path / "model-config.yaml").write_text("batchSize: 3\nminWorkers: 3\n")
    manifest = Manifest(model_name="m", version="1.0", config_file="model-config.yaml")
    source = Source(url="m", folder=tmp_path, manifest=manifest)
    server = ServerConfig(models={"m": {"1.0": {"batchSize": 2, "maxBatchDelay": 7}}})
    settings = settings_of(server, source, "m", ModelConfig(), {"min_workers": 5}, workers=True)
    assert (settings.batch_size, settings.batch_delay_s, settings.min_workers) == (3, 0.007, 5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": ""}, BrokenArchive),
        ({"runtime": "java"}, BadRequest),
        ({"handler": None}, BrokenArchive),
        ({"name": "taken"}, ModelExists),
        ({"problem": "it is no archive"}, WorkersFailed),
    ],
)
def test_what_cannot_be_a_model_is_refused(tmp_path, change, error):
    registry = Registry()
    registry.add(SimpleNamespace(name="taken", version="1.0"))
    options = {"name": "m", "handler": "h.py", "runtime": None, "problem": "", **change}
    manifest = Manifest(model_name="m", version="1.0")
    source = Source(url="m", folder=tmp_path, manifest=manifest, problem=options.pop("problem"))
    host = SimpleNamespace(config=ServerConfig())
    with pytest.raises(error):
        new_model(source, settings=ModelConfig(min_workers=1), registry=registry, host=host, **options)
