"""SavedModel: what it takes to register a model again; documents of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from flambeau.config.model import MODEL_DEFAULTS, ModelConfig
from flambeau.errors import ConfigError
from flambeau.serving.model import Model
from flambeau.serving.model_sources.urls import is_url
from flambeau.serving.registry import Registry
from flambeau.serving.traffic_split import WHOLE

FORMAT = 1  # of the document; a reader refuses a higher one
SETTINGS = ("batch_size", "batch_delay_s", "response_timeout_s", "startup_timeout_s")  # of ModelConfig, if given
ORIGIN = "the state file"

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0)]
Percent = Annotated[int, Meta(ge=0, le=WHOLE)]
Seconds = Annotated[float, Meta(ge=0)]
Key = tuple[str, str]  # name and version


class SavedModel(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One name and version: where it comes from, and what was set when it was registered and since."""

    name: Name
    version: Name
    url: Name  # as registered, without a query
    path: Name | None = None  # that the operator named, or of the downloaded file
    is_downloaded: bool = False  # the path is deleted when the model is unregistered
    is_signed: bool = False  # requests of a download are signed for S3
    handler: str | None = None
    is_default: bool = False
    min_workers: Count
    max_workers: Count
    batch_size: Annotated[int, Meta(ge=1)] | None = None
    batch_delay_s: Seconds | None = None
    response_timeout_s: Seconds | None = None
    startup_timeout_s: Seconds | None = None
    traffic_percent: Percent = 0  # of the requests that name no version; 0: the default's, or none
    max_errors: Percent | None = None  # percent, beyond which it gets no more of them

    @property
    def key(self) -> Key:
        return self.name, self.version

    @property
    def is_initial(self) -> bool:
        """Whether a command line brought it, which alone can name any path; the next one brings it back, or not."""
        return self.path is not None and not self.is_downloaded

    @property
    def label(self) -> str:
        """How it is shown where models are listed by name."""
        return f"{self.name} {self.version}"

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings as fields of ModelConfig, which take precedence over the model's YAML."""
        given = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        given |= {"min_workers": self.min_workers, "max_workers": max(self.min_workers, self.max_workers)}
        return {**given, "origins": dict.fromkeys(given, ORIGIN)}

    def location(self, store: Path | None) -> Path | None:
        """Where its files are on this machine; None if they must be downloaded, or nobody can tell."""
        if self.path is not None:
            return Path(self.path)
        return None if is_url(self.url) or store is None else store / self.url


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """What a state file holds."""

    format: int
    models: tuple[SavedModel, ...]


class AnyFormat(Struct, frozen=True):
    """The part of a document that every format has."""

    format: Annotated[int, Meta(ge=1)]


def to_document(registry: Registry, not_restored: Collection[SavedModel] = ()) -> bytes:
    """All models, without the nodes of workflows; and those that are not restored, as they were saved."""
    claimed = {saved.name for saved in not_restored if saved.is_default}  # until somebody chooses another default
    models = [
        to_saved(model, is_default=registry.is_default(model) and model.name not in claimed)
        for model in registry
        if not model.workflow
    ]
    document = Document(format=FORMAT, models=tuple(sorted((*models, *not_restored), key=lambda saved: saved.key)))
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def to_saved(model: Model, *, is_default: bool) -> SavedModel:
    given, downloaded = model.given, model.source.downloaded
    path = downloaded or given.path
    percent = 0 if model.split is None or is_default else model.split.percent_of(model)
    return SavedModel(
        name=model.name,
        version=model.version,
        url=without_query(given.url),
        path=None if path is None else str(path.absolute()),
        is_downloaded=downloaded is not None,
        is_signed=given.is_signed,
        handler=given.handler,
        is_default=is_default,
        min_workers=model.pool.min_workers,
        max_workers=model.pool.max_workers,
        traffic_percent=percent,
        max_errors=model.error_limit.percent if percent and model.error_limit is not None else None,
        **given_settings(model.config, model.source.manifest.config_file if model.source.manifest else None),
    )


def given_settings(config: ModelConfig, own_file: str | None) -> dict[str, Any]:
    """The settings that came with a registration, not from the model's YAML or from what the server sets for all."""
    elsewhere = (None, own_file, MODEL_DEFAULTS)
    origins = {name: config.origins.get(name) for name in SETTINGS}
    return {
        name: getattr(config, name)
        for name, origin in origins.items()
        if origin not in elsewhere and not str(origin).startswith("the setting ")
    }


def without_query(url: str) -> str:
    """A URL without its query and fragment, which may hold a signature; a path as it is."""
    return url.partition("?")[0].partition("#")[0] if is_url(url) else url


def read_document(content: bytes) -> Sequence[SavedModel]:
    """The models of a document; raises ConfigError with what is wrong, and the remedy."""
    damaged = "it is damaged: {}. Bring back a copy, or move it away to start without the models that it has"
    try:
        format = msgspec.json.decode(content, type=AnyFormat).format
        if format > FORMAT:
            text = f"it has format {format}, and this version of Flambeau reads up to {FORMAT}"
            raise ConfigError(f"{text}; start the version that wrote it, or name another file")
        models = msgspec.json.decode(content, type=Document).models
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(damaged.format(error)) from None
    if twice := repeated(model.key for model in models):
        raise ConfigError(damaged.format(f"it has {twice[0]} {twice[1]} twice"))
    return models


def repeated(keys: Iterable[Key]) -> Key | None:
    """The first key that is there twice."""
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None
