"""A model folder that nobody packed: what its files say where a manifest would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import Manifest, read_manifest
from flambeau.errors import ConfigError

CONFIG = "model-config.yaml"
MODEL_SUFFIXES = (".pt", ".pth", ".pt2", ".so", ".onnx", ".safetensors", ".bin")


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a model folder, or what stands for one; None when nothing there speaks of a model."""
    return read_manifest(folder) or describe(folder)


def describe(folder: Path) -> Manifest | None:
    """Put a manifest together from model-config.yaml, handler.py, model.py and a lone model file."""
    options = read_config(folder) if (folder / CONFIG).is_file() else None
    files = sorted(path.name for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES) if folder.is_dir() else []
    if options is None and len(files) != 1:
        return None
    said = options or {}
    model = {
        "modelName": text(said, "modelName") or folder.name,
        "modelVersion": str(said.get("modelVersion") or "1.0"),
        "handler": handler_of(said) or ("handler.py" if (folder / "handler.py").is_file() else ""),
        "serializedFile": text(said, "serializedFile") or (files[0] if len(files) == 1 else ""),
        "modelFile": text(said, "modelFile") or ("model.py" if (folder / "model.py").is_file() else ""),
        "configFile": CONFIG if options is not None else "",
    }
    return Manifest.from_dict({"model": {key: value for key, value in model.items() if value}})


def handler_of(options: Mapping[str, Any]) -> str | None:
    """The handler a model-config names: `handler: image_classifier`, or `handler: {name: image_classifier, …}`."""
    named = options.get("handler")
    if isinstance(named, Mapping):
        named = named.get("name")
    return named if isinstance(named, str) else None


def text(options: Mapping[str, Any], key: str) -> str | None:
    """A name that a model-config gives."""
    value = options.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} in {CONFIG} must be text, not {value!r}")
    return value


def read_config(folder: Path) -> Mapping[str, Any]:
    """The model-config of a folder."""
    from flambeau.config.model import read_options

    return read_options(folder / CONFIG)
