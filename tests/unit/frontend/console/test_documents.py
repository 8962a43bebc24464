"""Settings of a model for the console."""

from __future__ import annotations

from dataclasses import fields

from flambeau.config.model import ModelConfig
from flambeau.frontend.console.documents import MAIN, OTHERS, settings_document

OPTIONS = {
    "batchSize": 8,
    "scaleToZero": True,
    "example": "x",
    "handler": {"topk": 3, "api_key": "a", "max_new_tokens": 9},
    "url": "https://me:pass@host/x",
}


def test_settings_tell_their_value_and_origin():
    config = (
        ModelConfig().with_options(OPTIONS, "model-config.yaml of m").updated({"queue_size": 5}, "--job-queue-size")
    )
    rows = {key: (value, origin) for key, value, origin in settings_document(config, 1, 3)}
    assert rows["batchSize"] == ("8", "model-config.yaml")
    assert rows["scaleToZero"] == ("on", "model-config.yaml")
    assert rows["jobQueueSize"] == ("5", "--job-queue-size")
    assert rows["responseTimeout"] == ("120 s", "default")
    assert (rows["minWorkers"], rows["maxWorkers"]) == (("1", "default"), ("3", "scaled"))
    assert "idleTimeoutInSec" not in rows  # nobody has set it


def test_options_of_the_handler_are_listed_without_secrets():
    rows = {key: value for key, value, _ in settings_document(ModelConfig().with_options(OPTIONS), 1, 1)}
    assert (rows["handler.topk"], rows["handler.max_new_tokens"]) == ("3", "9")
    assert "a" not in rows["handler.api_key"]
    assert "pass" not in rows["url"]
    assert "example" not in rows


def test_every_setting_can_be_shown():
    shown = {name for _, name, _ in (*MAIN, *OTHERS)}
    assert {field.name for field in fields(ModelConfig)} - shown == {"options", "origins"}
    for _, name, write in (*MAIN, *OTHERS):
        assert isinstance(write(getattr(ModelConfig(), name)), str)
