"""Paths on the command line become initial models."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.cli.serve import ModelOverrides, find_models, find_store
from flambeau.errors import ConfigError


def test_handler_file_is_a_model_of_its_name(tmp_path):
    (tmp_path / "words.py").touch()
    [model] = find_models(tmp_path / "words.py", ModelOverrides())
    assert (model.name, model.handler, model.is_required) == ("words", "words.py", True)


def test_model_file_takes_the_name_and_handler_of_the_command_line(tmp_path):
    (tmp_path / "net.pt").touch()
    [model] = find_models(tmp_path / "net.pt", ModelOverrides(name="cats", handler="image_classifier"))
    assert (model.name, model.handler) == ("cats", "image_classifier")


def test_folder_with_a_handler_is_a_model_and_others_are_stores(tmp_path):
    model, store = tmp_path / "model", tmp_path / "store"
    for folder in (model, store):
        folder.mkdir()
    (model / "handler.py").touch()
    (store / "a.mar").touch()
    assert [found.name for found in find_models(model, ModelOverrides())] == ["model"]
    [found] = find_models(store, ModelOverrides())
    assert (found.path.name, found.is_required) == ("a.mar", False)
    assert find_store([model, store], None) == store
    assert find_store([model], None) is None


def test_other_files_are_rejected(tmp_path):
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path / "notes.txt", Path("/no/such")):
        with pytest.raises(ConfigError):
            [*find_models(path, ModelOverrides())]


@pytest.mark.parametrize(("config", "is_warned"), [("{}", True), ("handler: {trust_remote_code: true}", False)])
def test_code_of_a_folder_that_is_not_run_is_named(tmp_path, caplog, config, is_warned):
    (tmp_path / "config.json").write_text('{"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model-config.yaml").write_text(config)
    [model] = find_models(tmp_path, ModelOverrides())
    assert model.handler == "gpt_handler"
    assert ("trust_remote_code is off" in caplog.text) == is_warned
