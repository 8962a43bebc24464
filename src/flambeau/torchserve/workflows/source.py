"""Finds, downloads and unpacks a workflow archive."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from flambeau.config.yaml_file import MAX_YAML_BYTES, load_yaml
from flambeau.errors import ArchiveError, BrokenWorkflow, ConfigError, WorkflowNotFound
from flambeau.serving.model_sources.store import Store
from flambeau.serving.model_sources.urls import is_url
from flambeau.torchserve.workflows.manifest import WorkflowManifest, read_workflow_manifest
from flambeau.torchserve.workflows.spec import WorkflowSpec, read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSource:
    """An unpacked workflow: its URL, folder, manifest and specification."""

    url: str
    folder: Path
    manifest: WorkflowManifest
    spec: WorkflowSpec
    downloaded: Path | None = None

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
        return WorkflowSource(url=url, folder=folder, manifest=manifest, spec=spec, downloaded=downloaded)
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
        with path.open("rb") as file:
            return load_yaml(file.read(MAX_YAML_BYTES + 1), path.name)
    except (ConfigError, OSError) as error:
        raise BrokenWorkflow("Failed to parse yaml.", cause=str(error)) from None
