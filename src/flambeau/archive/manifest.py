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
    """What an archive says about its model; file names are relative to the archive's root."""

    model_name: str
    handler: str = ""
    version: str = "1.0"
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    runtime: str = "python"
    # The document as it was read, unknown fields included: handlers see it as context.manifest.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, document: Any) -> Manifest:
        """Read a parsed manifest of any age; fields that are unknown or missing are no mistake."""
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
            # An archive without a name is legal: the one who registers it then gives the name.
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
        """Return the document that is written into an archive, in TorchServe's spelling."""
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
    """Read a manifest from its bytes; `source` is what an error calls it."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BrokenArchive(f"{source} is not JSON: {error}") from error
    return Manifest.from_dict(document)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of an unpacked archive, whose files lie in it; None when it has none, which is legal."""
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
    """Refuse a manifest that names a file elsewhere, or one that is none: a pipe would be waited for without end.

    A link may lead anywhere: unpacking lets none out of the folder, and in a folder of their own they are the
    operator's. Whether a file is missing is for those who need it to say.
    """
    named = {
        "serializedFile": manifest.serialized_file,
        "modelFile": manifest.model_file,
        "requirementsFile": manifest.requirements_file,
        "configFile": manifest.config_file,
    }
    for field_name, name in named.items():
        if name and not _is_own(folder, name):
            raise BrokenArchive(f"The manifest names {name!r} as {field_name}, which is no file of the model's folder.")


def _is_own(folder: Path, name: str) -> bool:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    try:
        kind = (folder / path).stat().st_mode
    except (OSError, ValueError):  # there is none, or no file system takes the name
        return True
    return stat.S_ISREG(kind) or stat.S_ISDIR(kind)


def _text(model: Mapping[str, Any], name: str) -> str | None:
    value = model.get(name)
    # An empty name means no file, as it does to TorchServe's handlers.
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BrokenArchive(f"Field model.{name} of the manifest must be text, not {_kind(value)}.")
    return value


def _version(model: Mapping[str, Any]) -> str | None:
    # TorchServe reads a number here as its text, and hand-written manifests do hold 1.0 without quotes.
    value = model.get("modelVersion")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _text(model, "modelVersion")


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "an object")
