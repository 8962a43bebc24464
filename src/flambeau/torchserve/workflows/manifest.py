"""The manifest of a workflow archive (.war), and writing such an archive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flambeau import __version__
from flambeau.archive.writer import atomic_write, write_zip
from flambeau.errors import ArchiveError, BrokenArchive

WORKFLOW_MANIFEST = "WAR-INF/MANIFEST.json"


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
            "archiverVersion": __version__,
        }


def read_workflow_manifest(folder: Path) -> WorkflowManifest:
    """Read the manifest of an unpacked archive and check that its files exist."""
    file = folder / WORKFLOW_MANIFEST
    try:
        document = json.loads(file.read_bytes())
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
