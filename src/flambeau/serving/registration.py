"""Creates a Model from its files: name, settings and checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import Manifest
from flambeau.config.model import ModelConfig, read_options
from flambeau.config.server import ServerConfig
from flambeau.errors import BadRequest, BrokenArchive, WorkersFailed
from flambeau.serving.model import Model
from flambeau.serving.model_sources.store import Source
from flambeau.serving.registry import Registry, check_name
from flambeau.serving.workers.worker_factory import Host

RUNTIMES = (None, "python", "python3", "LSP")  # that existing clients may name


def settings_of(
    server: ServerConfig, source: Source, name: str, config: ModelConfig, overrides: Mapping[str, Any], *, workers: bool
) -> ModelConfig:
    """The defaults, overridden by `models` of the server's configuration, the model's YAML and then `overrides`."""
    manifest = source.manifest or Manifest(model_name="")
    if settings := server.models.get(name, {}).get(manifest.version):
        config = config.with_settings(settings, workers=workers)
    if named := manifest.config_file:
        config = config.with_options(read_options(source.folder / named), f"{named} of {name}")
    return replace(config, **overrides)


def new_model(
    source: Source,
    *,
    name: str,
    handler: str | None,
    runtime: str | None,
    settings: ModelConfig,
    registry: Registry,
    host: Host,
) -> Model:
    """The model of a source; raises if its name, runtime, handler or files are not usable."""
    manifest = source.manifest or Manifest(model_name="")
    if not name:
        raise BrokenArchive("Model name is not defined.", cause=source.problem)
    if runtime not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    check_name(name)
    check_name(manifest.version)
    registry.check_free(name, manifest.version)
    handler = handler or manifest.handler or host.config.default_handler
    if source.problem and settings.min_workers > 0:
        text = f"Failed to start workers for model {name} version: {manifest.version}"
        raise WorkersFailed(text, cause=source.problem)
    if not handler and not source.problem:
        raise BrokenArchive(
            f"model {name} names no handler; give one in its manifest, in the register call, or by default"
        )
    return Model(name, manifest.version, handler or "", source, settings, host)


def name_from(url: str) -> str:
    """The default name of a model: that of its file, with every other character than a word character replaced."""
    file = Path(url).name
    stem = next((file.removesuffix(suffix) for suffix in (".tar.gz", ".tgz") if file.endswith(suffix)), Path(file).stem)
    return re.sub(r"\W|^_", "_", stem)
