from __future__ import annotations

import pytest

from flambeau.archive.model_folder import manifest_of
from flambeau.errors import ConfigError


def folder_of(path, **files):
    for name, content in files.items():
        (path / name.replace("__", "-").replace("_", ".")).write_text(content)
    return path


def test_folder_without_model_files_has_no_manifest(tmp_path):
    assert manifest_of(folder_of(tmp_path, notes_txt="x")) is None


def test_lone_model_file_speaks_for_itself(tmp_path):
    manifest = manifest_of(folder_of(tmp_path, net_pt="x", model_py=""))
    assert (manifest.serialized_file, manifest.model_file, manifest.config_file) == ("net.pt", "model.py", None)
    assert manifest.raw["model"]["serializedFile"] == "net.pt"


def test_two_model_files_say_nothing(tmp_path):
    assert manifest_of(folder_of(tmp_path, a_pt="x", b_pt="y")) is None


@pytest.mark.parametrize("handler", ["handler: onnx", "handler: {name: onnx, batch: false}"])
def test_model_config_names_a_handler(tmp_path, handler):
    manifest = manifest_of(folder_of(tmp_path, model__config_yaml=handler, handler_py=""))
    assert (manifest.handler, manifest.config_file, manifest.model_name) == ("onnx", "model-config.yaml", tmp_path.name)


def test_handler_file_is_found(tmp_path):
    config = "handler: {topk: 3}\nmodelVersion: 2"
    manifest = manifest_of(folder_of(tmp_path, model__config_yaml=config, handler_py=""))
    assert (manifest.handler, manifest.version) == ("handler.py", "2")


def test_names_must_be_text(tmp_path):
    with pytest.raises(ConfigError, match=r"serializedFile in model-config.yaml must be text"):
        manifest_of(folder_of(tmp_path, model__config_yaml="serializedFile: [a]"))


def test_manifest_comes_first(tmp_path):
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "packed", "handler": "h.py"}}')
    assert manifest_of(folder_of(tmp_path, net_pt="x")).model_name == "packed"
