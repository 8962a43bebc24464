"""docs/configuration.md names every key, with the default that the code has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flambeau.config.model import MODEL_KEYS, ModelConfig
from flambeau.torchserve.config_keys import KEYS, known_keys
from flambeau.torchserve.config_properties import TORCHSERVE, parse, to_properties
from flambeau.torchserve.snapshot import read_snapshot

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def rows(begin, end):
    """(key, default) of each row of the tables between two headings."""
    part = PAGE[PAGE.index(f"\n## {begin}\n") : PAGE.index(f"\n## {end}\n")]
    return re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`|none) \|", part, re.MULTILINE)


SERVER, MODEL = dict(rows("config.properties", "Environment")), dict(rows("model-config.yaml", "Models"))


def test_every_key_is_there_once():
    assert sorted(key for key, _ in rows("config.properties", "Environment")) == sorted(known_keys())
    assert sorted(key for key, _ in rows("model-config.yaml", "Models")) == sorted(MODEL_KEYS)


@pytest.mark.parametrize("key", [key for key, default in SERVER.items() if default])
def test_default_of_a_server_key_is_true(key):
    server = to_properties({key: SERVER[key]}, TORCHSERVE, {}).server
    assert replace(server, allowed_urls=(), files_from_urls=True) == TORCHSERVE  # these follow from the addresses


@pytest.mark.parametrize("key", [key for key, default in SERVER.items() if not default and key in KEYS])
def test_server_key_without_a_default_has_none(key):
    value = TORCHSERVE
    for part in KEYS[key].field_path.split("."):
        value = getattr(value, part)
    assert value in (None, "", ())


@pytest.mark.parametrize("key", [key for key, default in MODEL.items() if default])
def test_default_of_a_model_key_is_true(key):
    config = ModelConfig().with_options({key: yaml.safe_load(MODEL[key])})
    assert config.with_options({}) == ModelConfig()


def test_examples_are_read():
    examples = [parse(text, {}) for text in re.findall(r"```properties\n(.*?)```", PAGE, re.DOTALL)]
    assert to_properties(examples[0], TORCHSERVE, {}).server.models["mnist"]["1.0"]["batchSize"] == 4
    [saved] = read_snapshot(examples[1]["model_snapshot"])
    assert (saved.name, saved.settings["max_workers"]) == ("mnist", 5)
