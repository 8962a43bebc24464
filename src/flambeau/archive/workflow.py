"""Workflow archives (.war): a specification, an optional handler, a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flambeau import __version__
from flambeau.archive.pack import check_name, gather
from flambeau.archive.writing import appearing_whole, write_zip
from flambeau.errors import ArchiveError, BrokenArchive, MissingFile

WORKFLOW_MANIFEST = "WAR-INF/MANIFEST.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowManifest:
    """What a workflow archive says of itself; file names are relative to its root."""

    name: str
    spec_file: str = ""
    handler: str = ""  # empty: every node is a model
    # The document as it was read, unknown fields included.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, document: Any) -> WorkflowManifest:
        """Read a parsed manifest; fields that are unknown are no mistake."""
        workflow = document.get("workflow") if isinstance(document, Mapping) else None
        if not isinstance(workflow, Mapping):
            raise BrokenArchive("Missing Workflow entry in manifest file.")
        name = _text(workflow, "workflowName")
        if not name:
            raise BrokenArchive("Workflow name is not defined.")
        return cls(name=name, spec_file=_text(workflow, "specFile"), handler=_text(workflow, "handler"), raw=document)

    def to_dict(self, *, created_on: datetime | None = None) -> dict[str, Any]:
        """Return the document that is written into an archive, in TorchServe's spelling."""
        workflow = {"workflowName": self.name, "specFile": self.spec_file, "handler": self.handler}
        return {
            "createdOn": (created_on or datetime.now()).strftime("%d/%m/%Y %H:%M:%S"),
            "workflow": {name: value for name, value in workflow.items() if value},
            "archiverVersion": __version__,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRecipe:
    """What goes into a workflow archive; extra files are files, and lie at its root."""

    workflow_name: str
    spec_file: Path
    handler: Path | None = None
    extra_files: Sequence[Path] = ()


def read_workflow_manifest(folder: Path) -> WorkflowManifest:
    """Read the manifest of an unpacked workflow archive; the files it names are there."""
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


def to_workflow_manifest(recipe: WorkflowRecipe) -> WorkflowManifest:
    """Describe a recipe the way its archive will: base names only."""
    return WorkflowManifest(
        name=recipe.workflow_name,
        spec_file=recipe.spec_file.name,
        handler=recipe.handler.name if recipe.handler else "",
    )


def pack_workflow(
    recipe: WorkflowRecipe, export_path: Path, *, force: bool = False, manifest: bytes | None = None
) -> Path:
    """Pack a workflow and return where it lies; the file appears whole or not at all."""
    check_name(recipe.workflow_name, "Workflow")
    target = export_path / f"{recipe.workflow_name}.war"
    if os.path.lexists(target) and not force:
        raise ArchiveError(f"{target} already exists. Remove it, choose another export path, or use --force.")
    document = manifest or json.dumps(to_workflow_manifest(recipe).to_dict(), indent=2).encode()
    try:
        with appearing_whole(target) as file:
            write_zip(file, gather(_named_files(recipe)), document, manifest_name=WORKFLOW_MANIFEST)
    except ArchiveError:
        raise
    except OSError as error:
        raise ArchiveError(f"Cannot pack {target}: {error.filename or target}: {error.strerror}") from error
    return target


def _named_files(recipe: WorkflowRecipe) -> Iterator[tuple[str, Path]]:
    for file in (recipe.spec_file, recipe.handler, *recipe.extra_files):
        if file is not None:
            if not file.is_file():
                raise MissingFile(f"File does not exist: {file}")
            yield file.name, file


def _text(workflow: Mapping[str, Any], name: str) -> str:
    value = workflow.get(name)
    if value is not None and not isinstance(value, str):
        raise BrokenArchive(f"Field workflow.{name} of the manifest must be text, not {value!r}.")
    return value or ""
