"""Workflow archives are read and written."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import pytest

from flambeau.archive.unpack import unpack
from flambeau.errors import ArchiveError, BrokenArchive
from flambeau.torchserve.workflows.source import (
    WORKFLOW_MANIFEST,
    WorkflowManifest,
    read_workflow_manifest,
    write_workflow,
)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "spec.yaml").write_text("models: {}\ndag: {}\n")
    (tmp_path / "code" / "handler.py").write_text("def a(data, context): return data\n")
    return tmp_path / "code"


def write(manifest, files, target):
    sources = {file.name: file for file in files.iterdir()}
    return write_workflow(target, sources, json.dumps(manifest.to_dict()).encode())


def test_a_packed_workflow_is_read_back(files, tmp_path):
    (files / "labels.txt").write_text("x")
    manifest = WorkflowManifest(name="flow", spec_file="spec.yaml", handler="handler.py")
    path = write(manifest, files, tmp_path / "flow.war")
    with zipfile.ZipFile(path) as archive:
        assert set(archive.namelist()) == {WORKFLOW_MANIFEST, "handler.py", "labels.txt", "spec.yaml"}
        document = json.loads(archive.read(WORKFLOW_MANIFEST))
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_DEFLATED}
    assert document["workflow"] == {"workflowName": "flow", "specFile": "spec.yaml", "handler": "handler.py"}
    assert document.keys() == {"createdOn", "workflow", "archiverVersion"}
    unpack(path, tmp_path / "out")
    assert read_workflow_manifest(tmp_path / "out") == replace(manifest, raw=document)


def test_a_workflow_needs_no_handler(files, tmp_path):
    path = write(WorkflowManifest(name="flow", spec_file="spec.yaml"), files, tmp_path / "flow.war")
    unpack(path, tmp_path / "out")
    assert read_workflow_manifest(tmp_path / "out").handler == ""


def test_archive_that_cannot_be_written_is_named(files, tmp_path):
    manifest = WorkflowManifest(name="flow", spec_file="spec.yaml")
    with pytest.raises(ArchiveError, match="Cannot pack"):
        write(manifest, files, tmp_path / "absent" / "flow.war")
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "Missing Workflow entry"),
        ("[]", "Missing Workflow entry"),
        ("{", "is not JSON"),
        ('{"workflow": {}}', "Workflow name is not defined"),
        ('{"workflow": {"workflowName": 3}}', "workflowName of the manifest must be text"),
        ('{"workflow": {"workflowName": "a"}}', "names no specFile"),
        ('{"workflow": {"workflowName": "a", "specFile": "b.yaml"}}', "no such file"),
        ('{"workflow": {"workflowName": "a", "specFile": "../b.yaml"}}', "no such file"),
    ],
)
def test_a_broken_manifest_says_what_is_wrong(tmp_path, document, message):
    (tmp_path / "b.yaml").write_text("")
    folder = tmp_path / "folder"
    (folder / "WAR-INF").mkdir(parents=True)
    if document is not None:
        (folder / WORKFLOW_MANIFEST).write_text(document)
    with pytest.raises(BrokenArchive, match=message):
        read_workflow_manifest(folder)
