"""The settings of a model: where they are read."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from flambeau.archive.manifest import MANIFEST
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.serving import registration
from flambeau.serving.server import Server


def test_a_models_yaml_is_read_in_a_thread(tmp_path, monkeypatch):
    (tmp_path / MANIFEST).parent.mkdir()
    (tmp_path / MANIFEST).write_text(json.dumps({"model": {"modelName": "m", "handler": "h", "configFile": "c.yaml"}}))
    readers = []

    def read_options(path):
        readers.append(threading.current_thread())
        raise ConfigError("that is enough")

    monkeypatch.setattr(registration, "read_options", read_options)
    with pytest.raises(ConfigError, match="enough"):
        asyncio.run(Server(ServerConfig()).register("m", path=tmp_path, config=ModelConfig()))
    assert readers
    assert threading.main_thread() not in readers
