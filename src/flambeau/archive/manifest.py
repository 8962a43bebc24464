"""MANIFEST.json ↔ Manifest."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flambeau import __version__
from flambeau.errors import BrokenArchive

MANIFEST = "MAR-INF/MANIFEST.json"
RUNTIMES = ("python", "python3", "LSP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a model in its archive; file names are relative to the archive's root."""

    model_name: str
    handler: str = ""
    version: str = "1.0"
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    runtime: str = "python"
    # The document with its unknown fields; handlers see it as context.manifest.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, document: Any) -> Manifest:
        """Read a parsed manifest; unknown and missing fields are allowed."""
        if not isinstance(document, Mapping):
            raise BrokenArchive(f"The manifest must be a JSON object, not {_kind(document)}.")
        model = document.get("model")
        if model is None:
            raise BrokenArchive("Missing Model entry in manifest file.")
        if not isinstance(model, Mapping):
            raise BrokenArchive(f"Field model of the manifest must be an object, not {_kind(model)}.")
        runtime = document.get("runtime")
        if runtime is not None and runtime not in RUNTIMES:
            raise BrokenArchive("Runtime is not defined or invalid.")
        return cls(
            # An archive may have no name: the register request then gives one.
            model_name=_text(model, "modelName") or "",
            handler=_text(model, "handler") or "",
            version=_version(model) or "1.0",
            serialized_file=_text(model, "serializedFile"),
            model_file=_text(model, "modelFile"),
            requirements_file=_text(model, "requirementsFile"),
            config_file=_text(model, "configFile"),
            runtime=runtime or "python",
            raw=document,
        )

    def to_dict(self, *, created_on: datetime | None = None) -> dict[str, Any]:
        """The document for MANIFEST.json."""
        model = {
            "modelName": self.model_name,
            "serializedFile": self.serialized_file,
            "handler": self.handler,
            "modelFile": self.model_file,
            "modelVersion": self.version,
            "requirementsFile": self.requirements_file,
            "configFile": self.config_file,
        }
        return {
            "createdOn": (created_on or datetime.now()).strftime("%d/%m/%Y %H:%M:%S"),
            "runtime": self.runtime,
            "model": {name: value for name, value in model.items() if value},
            "archiverVersion": __version__,
        }


def parse_manifest(content: bytes, source: str) -> Manifest:
    """Read a manifest from its bytes; `source` is its name in errors."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BrokenArchive(f"{source} is not JSON: {error}") from error
    return Manifest.from_dict(document)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of an unpacked archive; None if it has none, which is allowed."""
    file = folder / MANIFEST
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BrokenArchive(f"{file} cannot be read: {error.strerror}") from error
    manifest = parse_manifest(content, str(file))
    check_files(manifest, folder)
    return manifest


def check_files(manifest: Manifest, folder: Path) -> None:
    """Reject a manifest that names a path outside of the folder, or a pipe or device, which would block a reader.

    Links are allowed: unpacking rejects links out of the folder, and a folder of the operator may have any.
    Missing files are reported by their readers.
    """
    named = {
        "serializedFile": manifest.serialized_file,
        "modelFile": manifest.model_file,
        "requirementsFile": manifest.requirements_file,
        "configFile": manifest.config_file,
    }
    for field_name, name in named.items():
        if name and not _is_own(folder, name):
            raise BrokenArchive(f"The manifest names {name!r} as {field_name}, which is not in the model's folder.")


def _is_own(folder: Path, name: str) -> bool:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    try:
        kind = (folder / path).stat().st_mode
    except (OSError, ValueError):  # missing, or a name that is invalid on this file system
        return True
    return stat.S_ISREG(kind) or stat.S_ISDIR(kind)


def _text(model: Mapping[str, Any], name: str) -> str | None:
    value = model.get(name)
    # Archivers write an empty name for no file.
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BrokenArchive(f"Field model.{name} of the manifest must be text, not {_kind(value)}.")
    return value


def _version(model: Mapping[str, Any]) -> str | None:
    # Hand-written manifests have 1.0 without quotes.
    value = model.get("modelVersion")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _text(model, "modelVersion")


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "an object")
