"""Model folders without a manifest: one is derived from their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import Manifest, read_manifest
from flambeau.errors import ConfigError

CONFIG = "model-config.yaml"
MODEL_SUFFIXES = (".pt", ".pth", ".pt2", ".so", ".onnx", ".safetensors", ".bin")


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a model folder, or one derived from its files; None if the folder is not a model."""
    return read_manifest(folder) or derive_manifest(folder)


def derive_manifest(folder: Path) -> Manifest | None:
    """Derive a manifest from model-config.yaml, handler.py, model.py and a single model file."""
    options = read_config(folder) if (folder / CONFIG).is_file() else None
    files = sorted(path.name for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES) if folder.is_dir() else []
    if options is None and len(files) != 1:
        return None
    given = options or {}
    model = {
        "modelName": read_text(given, "modelName") or folder.name,
        "modelVersion": str(given.get("modelVersion") or "1.0"),
        "handler": handler_of(given) or ("handler.py" if (folder / "handler.py").is_file() else ""),
        "serializedFile": read_text(given, "serializedFile") or (files[0] if len(files) == 1 else ""),
        "modelFile": read_text(given, "modelFile") or ("model.py" if (folder / "model.py").is_file() else ""),
        "configFile": CONFIG if options is not None else "",
    }
    return Manifest.from_dict({"model": {key: value for key, value in model.items() if value}})


def handler_of(options: Mapping[str, Any]) -> str | None:
    """The handler in a model-config: `handler: image_classifier`, or `handler: {name: image_classifier, …}`."""
    named = options.get("handler")
    if isinstance(named, Mapping):
        named = named.get("name")
    return named if isinstance(named, str) else None


def read_text(options: Mapping[str, Any], key: str) -> str | None:
    value = options.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} in {CONFIG} must be text, not {value!r}")
    return value


def read_config(folder: Path) -> Mapping[str, Any]:
    from flambeau.config.model import read_options

    return read_options(folder / CONFIG)
