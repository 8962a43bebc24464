"""The models that a `torchserve` command starts with: `--models`, `load_models`, or a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flambeau.errors import ConfigError, ModelNotFound
from flambeau.serving.model_sources.store import unpacked_twin
from flambeau.torchserve.snapshot import SnapshotModel

SCHEMES = ("http://", "https://", "file://")
ARCHIVES = (".mar", ".model", ".tar.gz", ".tgz")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupModel:
    """One model to register before the ports open."""

    url: str  # as given
    name: str | None = None
    saved: SnapshotModel | None = None  # from a snapshot
    settings: Mapping[str, Any] = field(default_factory=dict)


def named_models(wanted: str, store: Path) -> list[StartupModel]:
    if wanted.strip().lower() == "all":
        return [StartupModel(url=file) for file in everything_in(store)]
    return [*_listed(wanted)]


def _listed(wanted: str) -> Iterator[StartupModel]:
    for value in filter(None, (part.strip() for part in wanted.split(","))):
        head, equals, tail = value.partition("=")
        if equals and "/" not in head:  # a URL may contain an equals sign
            yield StartupModel(url=tail.strip(), name=head.strip())
        else:
            yield StartupModel(url=value)


def everything_in(store: Path) -> list[str]:
    """The folders and archives of a store, without hidden ones."""
    return sorted(
        path.name
        for path in store.iterdir()
        if not path.name.startswith(".") and (path.is_dir() or path.name.endswith(ARCHIVES))
    )


def saved_models(saved: Sequence[SnapshotModel], store: Path) -> list[StartupModel]:
    """The models of a snapshot; raises ConfigError if an archive is missing."""
    for model in saved:
        if not model.archive.startswith(SCHEMES) and not _exists(model.archive, store):
            named = f"model {model.name}, version {model.version}"
            raise ConfigError(f"Model archive file for {named} not found in model store")
    return [StartupModel(url=m.archive, name=m.name, saved=m, settings=m.settings) for m in saved]


def _exists(archive: str, store: Path) -> bool:
    try:
        locate(archive, store)
    except ModelNotFound:
        return False
    return True


def locate(url: str, store: Path) -> Path | None:
    """The path of a model that the operator named, in the store first; None if it must be downloaded."""
    if url.startswith(SCHEMES):
        return None
    in_store, itself = store / Path(url).name, Path(url)
    if Path(url).name and in_store.is_file():
        return in_store
    if url and itself.is_dir():
        return itself
    if Path(url).name and in_store.is_dir():
        return in_store
    if itself.is_file():
        return itself
    if Path(url).name:
        for archive in (in_store, itself):  # a folder that was packed without an archive stands for it
            if (unpacked := unpacked_twin(archive)) is not None:
                return unpacked
    raise ModelNotFound(f"Model not found at: {url}")
