"""Finds, downloads and unpacks a workflow archive; its manifest."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flambeau.archive.writer import atomic_write, write_zip
from flambeau.config.yaml_file import MAX_YAML_BYTES, load_yaml
from flambeau.errors import ArchiveError, BrokenArchive, BrokenWorkflow, ConfigError, WorkflowNotFound
from flambeau.serving.model_sources.store import Origin, Store
from flambeau.serving.model_sources.urls import is_url
from flambeau.small_files import read_small
from flambeau.torchserve import WORKFLOW_ARCHIVER_VERSION
from flambeau.torchserve.workflows.spec import WorkflowSpec, read_spec

WORKFLOW_MANIFEST = "WAR-INF/MANIFEST.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSource:
    """An unpacked workflow: its URL, folder, manifest and specification."""

    url: str
    folder: Path
    manifest: WorkflowManifest
    spec: WorkflowSpec
    downloaded: Path | None = None
    origin: Origin | None = None

    def discard(self) -> None:
        """Delete the unpacked and the downloaded files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.downloaded is not None:
            self.downloaded.unlink(missing_ok=True)


async def open_workflow(store: Store, url: str, *, signed: bool) -> WorkflowSource:
    """Open the workflow at a URL: in the workflow store, or at an allowed remote URL."""
    if store.folder is None:
        raise WorkflowNotFound("Workflow store has not been configured.")
    if ".." in url:
        raise WorkflowNotFound(f"Relative path is not allowed in url: {url}")
    if not is_url(url):
        return await asyncio.to_thread(_read, store, _find(store.folder, url), url, None)
    if not store.downloader.allows(url):
        raise WorkflowNotFound(f"Given URL {url} does not match any allowed URL(s)")
    file = await store.downloader.download(url, store.folder, signed=signed)
    try:
        return await asyncio.to_thread(_read, store, file, url, file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _find(folder: Path, url: str) -> Path:
    """The file in the store; folders in the URL are ignored, as for models."""
    try:
        path = folder / Path(url).name
        if path.is_file() and path.resolve().is_relative_to(folder):
            return path
        exists = path.exists()
    except (OSError, ValueError):  # not a valid file name
        exists = False
    where = "at" if exists else "in workflow store"
    raise WorkflowNotFound(f"Workflow not found {where}: {url}")


def _read(store: Store, file: Path, url: str, downloaded: Path | None) -> WorkflowSource:
    try:
        folder = store.unpack(file)
    except ArchiveError as error:
        raise BrokenWorkflow("Workflow name is not defined.", cause=str(error)) from None
    try:
        manifest = _read_manifest(folder)
        spec = read_spec(_read_yaml(folder / manifest.spec_file), has_handler=bool(manifest.handler))
        origin = Origin.of(file, folder)
        return WorkflowSource(
            url=url, folder=folder, manifest=manifest, spec=spec, downloaded=downloaded, origin=origin
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _read_manifest(folder: Path) -> WorkflowManifest:
    try:
        manifest = read_workflow_manifest(folder)
    except ArchiveError as error:
        # TorchServe's text for an archive without a manifest.
        text = "Workflow name is not defined." if "Missing Workflow entry" in str(error) else str(error)
        raise BrokenWorkflow(text, cause=str(error)) from None
    for key, called in (("createdOn", "createdOn"), ("archiverVersion", "version")):
        if not manifest.raw.get(key):
            raise BrokenWorkflow(f"Workflow archive {called} is not defined.", cause=f"its manifest has no {key}")
    return manifest


def _read_yaml(path: Path) -> object:
    try:
        return load_yaml(read_small(path, MAX_YAML_BYTES), path.name)
    except (ConfigError, OSError) as error:
        raise BrokenWorkflow("Failed to parse yaml.", cause=str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowManifest:
    """The manifest; file names are relative to the archive's root."""

    name: str
    spec_file: str = ""
    handler: str = ""  # empty: every node is a model
    # The document as read, with unknown fields.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, document: Any) -> WorkflowManifest:
        """Read a parsed manifest; unknown fields are ignored."""
        workflow = document.get("workflow") if isinstance(document, Mapping) else None
        if not isinstance(workflow, Mapping):
            raise BrokenArchive("Missing Workflow entry in manifest file.")
        name = _text(workflow, "workflowName")
        if not name:
            raise BrokenArchive("Workflow name is not defined.")
        return cls(name=name, spec_file=_text(workflow, "specFile"), handler=_text(workflow, "handler"), raw=document)

    def to_dict(self, *, created_on: datetime | None = None) -> dict[str, Any]:
        """The document that is written into an archive."""
        workflow = {"workflowName": self.name, "specFile": self.spec_file, "handler": self.handler}
        return {
            "createdOn": (created_on or datetime.now()).strftime("%d/%m/%Y %H:%M:%S"),
            "workflow": {name: value for name, value in workflow.items() if value},
            "archiverVersion": WORKFLOW_ARCHIVER_VERSION,
        }


def read_workflow_manifest(folder: Path) -> WorkflowManifest:
    """Read the manifest of an unpacked archive and check that its files exist."""
    file = folder / WORKFLOW_MANIFEST
    try:
        document = json.loads(read_small(file))
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenArchive("Missing Workflow entry in manifest file.") from None
    except OSError as error:
        raise BrokenArchive(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenArchive(f"{file} is not JSON: {error}") from error
    manifest = WorkflowManifest.from_dict(document)
    for kind, name in (("specFile", manifest.spec_file), ("handler", manifest.handler)):
        if name and (Path(name).name != name or not (folder / name).is_file()):
            raise BrokenArchive(f"The manifest names {name!r} as {kind}, but there is no such file in the archive.")
    if not manifest.spec_file:
        raise BrokenArchive("The manifest names no specFile: a workflow needs one.")
    return manifest


def write_workflow(target: Path, sources: Mapping[str, Path], manifest: bytes) -> Path:
    try:
        with atomic_write(target) as file:
            write_zip(file, sources, manifest, manifest_name=WORKFLOW_MANIFEST)
    except OSError as error:
        raise ArchiveError(f"Cannot pack {target}: {error.filename or target}: {error.strerror}") from error
    return target


def _text(workflow: Mapping[str, Any], name: str) -> str:
    value = workflow.get(name)
    if value is not None and not isinstance(value, str):
        raise BrokenArchive(f"Field workflow.{name} of the manifest must be text, not {value!r}.")
    return value or ""
