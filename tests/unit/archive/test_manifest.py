from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import flambeau
from flambeau.archive.manifest import (
    MANIFEST,
    Manifest,
    explain_folder,
    explain_no_manifest,
    manifest_of,
    read_manifest,
)
from flambeau.errors import BrokenArchive, ConfigError


def write_manifest(folder: Path, content: bytes) -> None:
    file = folder / MANIFEST
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


def test_manifest_of_the_old_archiver_is_read_whole() -> None:
    document = {
        "createdOn": "01/02/2023 10:11:12",
        "runtime": "python3",
        "model": {
            "modelName": "digits",
            "serializedFile": "digits.pt",
            "handler": "handler.py:predict",
            "modelFile": "model.py",
            "modelVersion": "2.5",
            "requirementsFile": "requirements.txt",
            "configFile": "model-config.yaml",
        },
        "archiverVersion": "0.12.0",
    }
    assert Manifest.from_dict(document) == Manifest(
        model_name="digits",
        handler="handler.py:predict",
        version="2.5",
        serialized_file="digits.pt",
        model_file="model.py",
        requirements_file="requirements.txt",
        config_file="model-config.yaml",
        runtime="python3",
        raw=document,
    )


def test_unknown_and_missing_fields_are_allowed() -> None:
    document = {"specificationVersion": "1.0", "license": "x", "model": {"modelName": "m", "sourceVocab": "v.pt"}}
    manifest = Manifest.from_dict(document)
    assert (manifest.model_name, manifest.handler, manifest.version, manifest.runtime) == ("m", "", "1.0", "python")
    assert manifest.serialized_file is None
    assert manifest.raw["model"]["sourceVocab"] == "v.pt"


def test_nulls_count_as_missing() -> None:
    manifest = Manifest.from_dict({"runtime": None, "model": {"modelName": None, "handler": None, "modelVersion": ""}})
    assert (manifest.model_name, manifest.version, manifest.runtime) == ("", "1.0", "python")


def test_version_written_as_a_number_is_read_as_text() -> None:
    assert Manifest.from_dict({"model": {"modelName": "m", "modelVersion": 2.0}}).version == "2.0"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must be a JSON object, not a list"),
        ({}, "^Missing Model entry in manifest file.$"),
        ({"model": "m"}, "Field model of the manifest must be an object, not text"),
        ({"model": {}, "runtime": "java"}, "^Runtime is not defined or invalid.$"),
        ({"model": {}, "runtime": ["python"]}, "^Runtime is not defined or invalid.$"),
        ({"model": {"handler": 3}}, "model.handler of the manifest must be text, not a number"),
        ({"model": {"modelVersion": True}}, "model.modelVersion of the manifest must be text, not a boolean"),
    ],
)
def test_broken_manifest_is_rejected_by_name(document: Any, message: str) -> None:
    with pytest.raises(BrokenArchive, match=message):
        Manifest.from_dict(document)


def test_written_manifest_has_the_layout_of_the_old_archiver() -> None:
    manifest = Manifest(model_name="m", handler="h.py", version="1.1", serialized_file="w.pt")
    assert manifest.to_dict(created_on=datetime(2024, 12, 31, 23, 5, 9)) == {
        "createdOn": "31/12/2024 23:05:09",
        "runtime": "python",
        "model": {"modelName": "m", "handler": "h.py", "modelVersion": "1.1", "serializedFile": "w.pt"},
        "archiverVersion": flambeau.__version__,
    }


def test_manifest_survives_a_round_trip() -> None:
    manifest = Manifest(model_name="m", handler="h", config_file="c.yaml", runtime="LSP")
    document = manifest.to_dict()
    assert Manifest.from_dict(document).to_dict()["model"] == document["model"]


def test_manifest_is_read_from_a_folder(tmp_path: Path) -> None:
    write_manifest(tmp_path, b"\xef\xbb\xbf" + json.dumps({"model": {"modelName": "m"}}).encode())
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.model_name == "m"


def test_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "missing") is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff", b"[" * 100_000])
def test_manifest_that_is_not_json_is_rejected_with_its_path(tmp_path: Path, content: bytes) -> None:
    write_manifest(tmp_path, content)
    with pytest.raises(BrokenArchive, match=r"MAR-INF/MANIFEST.json is not JSON"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["configFile", "serializedFile", "modelFile", "requirementsFile"])
def test_files_of_a_manifest_are_files_of_its_folder(tmp_path: Path, field: str) -> None:
    folder = tmp_path / "model"
    outside = tmp_path / "outside"
    outside.write_text("x")
    os.mkfifo(tmp_path / "pipe")
    write_manifest(folder, b"")
    os.mkfifo(folder / "pipe")
    (folder / "linked").symlink_to(tmp_path / "pipe")
    (folder / "own").symlink_to(outside)  # a folder's links are its owner's, and unpacking makes none that lead out

    def read(name: str) -> Manifest | None:
        document = {"model": {"modelName": "m", "handler": "h.py", field: name}}
        (folder / MANIFEST).write_text(json.dumps(document))
        return read_manifest(folder)

    for name in (str(outside), "../outside", "sub/../../outside", "pipe", "linked"):
        with pytest.raises(BrokenArchive, match=f"names '{re.escape(name)}' as {field}"):
            read(name)
    for name in ("own", "missing", "./own", "x" * 5000):
        assert read(name) is not None


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


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "is empty; a model folder has a handler.py"),
        (["mine.py", "notes.txt"], "holds mine.py, but no handler.py; rename the one with the handler"),
        (["a.pt", "b.pt"], "holds a.pt, b.pt, but no handler.py; write handler: base_handler"),
        (
            ["consolidated.safetensors", "params.json"],
            "but no handler.py; if it is a language model, use flambeau llm serve",
        ),
        ([".hidden"], "is empty"),
        ([f"{i}.txt" for i in range(9)], "3.txt, 4.txt, …, but no handler.py"),
    ],
)
def test_folder_without_a_model_is_described(tmp_path, files, text):
    for name in files:
        (tmp_path / name).write_text("")
    assert text in explain_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["x.py"], "the archive has no MAR-INF/MANIFEST.json, but x.py; pack it with torch-model-archiver"),
        ([], "the archive has no MAR-INF/MANIFEST.json, but nothing; pack"),
        (
            ["cats/MAR-INF/MANIFEST.json", "cats/x.py"],
            "the archive has cats/MAR-INF/MANIFEST.json; pack the files in cats",
        ),
        (["MAR-INF/MANIFEST.json"], ""),
    ],
)
def test_archive_without_a_manifest_is_explained(tmp_path, files, words):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    sentence = explain_no_manifest(tmp_path)
    assert sentence.startswith(words)
    assert bool(sentence) == bool(words)


def test_error_names_the_archive_instead_of_the_folder_it_was_unpacked_to(tmp_path):
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text("{")
    with pytest.raises(BrokenArchive, match=r"^MANIFEST of cats.mar is not JSON"):
        read_manifest(tmp_path, "MANIFEST of cats.mar")
