"""Manifest: MANIFEST.json, or derived from the files of a model folder. The table of built-in handlers."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flambeau import __version__
from flambeau.archive.pretrained import choose_handler, configured_task, is_pretrained
from flambeau.errors import BrokenArchive, ConfigError
from flambeau.small_files import read_small

MANIFEST = "MAR-INF/MANIFEST.json"
RUNTIMES = ("python", "python3", "LSP")
BUILT_IN = {
    "base_handler": "flambeau.handlers.base:BaseHandler",
    "image_classifier": "flambeau.handlers.vision_handlers:ImageClassifier",
    "image_segmenter": "flambeau.handlers.vision_handlers:ImageSegmenter",
    "object_detector": "flambeau.handlers.vision_handlers:ObjectDetector",
    "dali_image_classifier": "flambeau.torchserve.handlers.dali:DALIImageClassifier",
    "text_classifier": "flambeau.handlers.text_classifier:TextClassifier",
    "onnx": "flambeau.handlers.onnx.handler:OnnxHandler",
    "gpt_handler": "flambeau.handlers.gpt:GptHandler",
    "sentence_embedder": "flambeau.handlers.embedding.handler:SentenceEmbedder",
    "transformers": "flambeau.handlers.pretrained.handler:TransformersHandler",
}
# Known names without a handler here: they can be packed, and the worker's error shows this advice.
UNSUPPORTED = {
    "trt_llm_handler": "it needs TensorRT-LLM; use gpt_handler, or pack a handler of your own that imports it",
    "vllm_handler": "it needs vLLM; use gpt_handler, or pack a handler of your own that imports it",
}
REQUIREMENTS = "requirements.txt"
CONFIG = "model-config.yaml"
MANIFEST_BYTES = 16 << 20
MAX_SHOWN = 5  # files in an error message
MODEL_SUFFIXES = (".pt", ".pth", ".pt2", ".so", ".onnx", ".safetensors", ".bin")


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


def explain_no_manifest(folder: Path) -> str:
    """Why an unpacked archive has no manifest, and what to do; empty if it has one."""
    if (folder / MANIFEST).is_file():
        return ""
    found = sorted(folder.glob(f"*/{MANIFEST}"))
    if found:
        inner = found[0].relative_to(folder).parts[0]
        return f"the archive has {inner}/{MANIFEST}; pack the files in {inner}, and not the folder around them"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    holds = ", ".join(names[:MAX_SHOWN]) + (", …" if len(names) > MAX_SHOWN else "")
    return f"the archive has no {MANIFEST}, but {holds or 'nothing'}; pack it with torch-model-archiver"


def read_manifest(folder: Path, name: str = "") -> Manifest | None:
    """Read the manifest of an unpacked archive; None if it has none, which is allowed. `name` is for errors."""
    file = folder / MANIFEST
    try:
        content = read_small(file, MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BrokenArchive(f"{file} cannot be read: {error.strerror}") from error
    manifest = parse_manifest(content, name or str(file))
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


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a model folder, or one derived from its files; None if the folder is not a model."""
    return read_manifest(folder) or derive_manifest(folder)


def derive_manifest(folder: Path) -> Manifest | None:
    """Derive a manifest from model-config.yaml, handler.py, model.py and a single model file, or from config.json."""
    options = read_config(folder) if (folder / CONFIG).is_file() else None
    files = sorted(path.name for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES) if folder.is_dir() else []
    given = options or {}
    if handler_of(given) is None and not (folder / "handler.py").is_file() and is_pretrained(folder):
        return derive_pretrained(folder, given)
    if options is None and len(files) != 1:
        return None
    model = {
        "modelName": read_text(given, "modelName") or folder.name,
        "modelVersion": str(given.get("modelVersion") or "1.0"),
        "handler": handler_of(given) or ("handler.py" if (folder / "handler.py").is_file() else ""),
        "serializedFile": read_text(given, "serializedFile") or (files[0] if len(files) == 1 else ""),
        "modelFile": read_text(given, "modelFile") or ("model.py" if (folder / "model.py").is_file() else ""),
        "requirementsFile": read_text(given, "requirementsFile") or requirements_in(folder) or "",
        "configFile": CONFIG if options is not None else "",
    }
    return Manifest.from_dict({"model": {key: value for key, value in model.items() if value}})


def requirements_in(folder: Path) -> str | None:
    """The file with the requirements of a model without a manifest, if its folder has one."""
    return REQUIREMENTS if (folder / REQUIREMENTS).is_file() else None


def derive_pretrained(folder: Path, options: Mapping[str, Any]) -> Manifest:
    """Derive the manifest of a Hugging Face folder; without a handler if no built-in one serves it."""
    try:
        handler = choose_handler(folder, configured_task(options)).handler
    except ConfigError:  # the command line shows the reason; a handler may be named there
        handler = ""
    model = {
        "modelName": read_text(options, "modelName") or folder.name,
        "modelVersion": str(options.get("modelVersion") or "1.0"),
        "handler": handler,
        "configFile": CONFIG if (folder / CONFIG).is_file() else "",
    }
    return Manifest.from_dict({"model": {key: value for key, value in model.items() if value}})


def explain_folder(folder: Path) -> str:
    """Why a folder is no model: what it holds, and what it lacks."""
    remedy = f"a model folder has a handler.py, or a {CONFIG} with handler: FILE.py or a built-in name"
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if not names:
        return f"the folder {folder} is empty; {remedy}"
    files = [name for name in names if name.endswith(".py")]
    if files:
        remedy = f"rename the one with the handler to handler.py, or write handler: {files[0]} into a {CONFIG}"
    elif "params.json" in names:  # Meta's and Mistral's own form of a language model
        remedy = (
            f"if it is a language model, use flambeau llm serve {folder}, or write handler: gpt_handler into a {CONFIG}"
        )
    elif any(name.endswith(MODEL_SUFFIXES) for name in names):
        remedy = f"write handler: base_handler, or another one, into a {CONFIG} beside it"
    shown = ", ".join((files or names)[:MAX_SHOWN]) + (", …" if len(files or names) > MAX_SHOWN else "")
    return f"the folder {folder} holds {shown}, but no handler.py; {remedy}"


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
