"""Registry: name → versions → Model; the first version of a name is its default. new_model(): a source as a Model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import Manifest, explain_no_manifest
from flambeau.config.model import ModelConfig, read_options
from flambeau.config.server import ServerConfig
from flambeau.errors import (
    BadRequest,
    BrokenArchive,
    DefaultVersionInUse,
    ModelExists,
    ModelNotFound,
    VersionNotFound,
    WorkersFailed,
    suggest,
)
from flambeau.serving.error_limit import ErrorLimit
from flambeau.serving.model import Model
from flambeau.serving.model_sources.store import Source
from flambeau.serving.traffic_split import WHOLE, TrafficSplit
from flambeau.serving.workers.worker_factory import Host

logger = logging.getLogger(__name__)

MAX_COMPARED_NAMES = 100  # comparing takes time, and names come from clients
MAX_NAME = 256  # characters of a name or version
MAX_HANDLER = 1024
RUNTIMES = (None, "python", "python3", "LSP")  # that existing clients may name


class Registry:
    """The models of a server, by name and version."""

    def __init__(self, *, suggests: bool = False, on_rollback: Callable[[], None] = lambda: None) -> None:
        """`suggests`: an error for an unknown name ends with a similar one. `on_rollback`: percentages have changed."""
        self._suggests = suggests
        self._on_rollback = on_rollback
        self._versions: dict[str, dict[str, Model]] = {}
        self._default: dict[str, str] = {}
        self._place: dict[str, int] = {}  # of a default version in the order of the start, until one is chosen
        self._percent: dict[str, dict[str, int]] = {}  # of requests, by name and version; the default has the rest

    def __iter__(self) -> Iterator[Model]:
        return (model for versions in [*self._versions.values()] for model in [*versions.values()])

    def has(self, name: str) -> bool:
        return name in self._versions

    def find(self, name: str, version: str | None = None) -> Model:
        """The model of that name, in its default version unless one is given."""
        versions = self._versions.get(name)
        if versions is None:
            raise ModelNotFound(f"Model not found: {name}", similar=partial(self._similar, name))
        model = versions.get(version or self._default[name])
        if model is None:
            raise VersionNotFound(f"Model version: {version} does not exist for model: {name}")
        return model

    def _similar(self, name: str) -> str | None:
        if not self._suggests:
            return None
        known = {one.lower().replace("-", "_"): one for one in islice(self._versions, MAX_COMPARED_NAMES)}
        return known.get(suggest(name, known) or "")

    def versions(self, name: str) -> list[Model]:
        self.find(name)
        return [*self._versions[name].values()]

    def defaults(self) -> list[Model]:
        """The default version of each model, by name."""
        return [self.find(name) for name in sorted(self._versions)]

    def is_default(self, model: Model) -> bool:
        """Whether requests that name no version go to this model."""
        return self._default.get(model.name) == model.version

    def check_free(self, name: str, version: str) -> None:
        """Raise if that name and version are taken."""
        if version in self._versions.get(name, {}):
            raise ModelExists(name, version)

    def add(self, model: Model, place: int | None = None) -> None:
        """Add a model; the first version of a name becomes its default.

        Those that are loaded at the start may come in any order: of them, the default is the one with the lowest place.
        """
        self.check_free(model.name, model.version)
        is_first = model.name not in self._versions
        self._versions.setdefault(model.name, {})[model.version] = model
        if is_first or (place is not None and place < self._place.get(model.name, -1)):
            self._default[model.name] = model.version
            if place is not None:
                self._place[model.name] = place
        self._split(model.name)

    def remove(self, name: str, version: str | None = None, *, even_default: bool = False) -> Model:
        """Remove a model; the default version only if it is the last one, or with `even_default`."""
        model = self.find(name, version)
        versions = self._versions[name]
        if self.is_default(model) and len(versions) > 1:
            if not even_default:
                raise DefaultVersionInUse(name)
            self._default[name] = next(other for other in versions if other != model.version)
        del versions[model.version]
        self._percent.get(name, {}).pop(model.version, None)
        if not versions:
            del self._versions[name], self._default[name]
            self._place.pop(name, None)
        model.mirror.close()
        self._split(name)
        return model

    def discard(self, model: Model) -> None:
        """Remove this model if it is still there: another may have its name and version by now."""
        if self._versions.get(model.name, {}).get(model.version) is model:
            self.remove(model.name, model.version, even_default=True)

    def set_default(self, name: str, version: str) -> None:
        """Make this version serve requests that name none."""
        self.find(name)
        if version not in self._versions[name]:
            raise VersionNotFound(f"Model version {version} does not exist for model {name}")
        self._default[name] = version
        self._place.pop(name, None)
        self._percent.get(name, {}).pop(version, None)
        self._versions[name][version].mirror.close()
        self._split(name)

    def set_traffic(self, name: str, version: str, percent: int, max_errors: int | None = None) -> None:
        """Give a version this percentage of the requests that name none; the default version has what is left.

        If more than `max_errors` percent of its answers are errors of the server, the version gets no more.
        """
        self._check_share(name, version, percent)
        current = self._percent.get(name, {})
        others = {other: share for other, share in current.items() if other != version}
        if percent + sum(others.values()) > WHOLE:
            known = ", ".join(f"{share} % for version {other}" for other, share in others.items())
            raise BadRequest(
                f"{percent} % for version {version} of {name}, beside {known}, are more than {WHOLE} %; lower one first"
            )
        # A version keeps its place, so that its keys stay with it.
        self._percent[name] = {**current, version: percent} if percent else others
        model = self.find(name, version)
        model.rolled_back = ""
        model.error_limit = None
        if percent and max_errors is not None:
            model.error_limit = ErrorLimit(max_errors, model.answers, lambda: model.num_broken)
        self._split(name)

    def _may_answer(self, default: Model, model: Model) -> bool:
        """Whether a version gets a request; one that has failed too often gets none any more."""
        if model.error_limit is not None and (reason := model.error_limit.excess()):
            self.set_traffic(model.name, model.version, 0)
            model.rolled_back = reason
            logger.warning("%s gets no part of the requests of %s any more: %s", model, default, reason)
            self._on_rollback()
            return False
        return can_share(model, default)

    def set_mirror(self, name: str, version: str, percent: int) -> None:
        """Send a version copies of this percentage of the default's requests that name no version."""
        self._check_share(name, version, percent)
        mirror = self.find(name, version).mirror
        if percent:
            mirror.percent = percent
        else:
            mirror.close()
        self._split(name)

    def _check_share(self, name: str, version: str, percent: int) -> None:
        """Raise if a version cannot get requests of the default."""
        model, default = self.find(name, version), self.find(name)
        if model is default:
            raise BadRequest(
                f"version {version} of {name} is the default and gets the requests that other versions leave; "
                "set the percentage of another version"
            )
        if percent and (reason := obstacle(model, default)):
            raise BadRequest(f"versions {default.version} and {version} of {name} cannot share requests: {reason}")

    def _split(self, name: str) -> None:
        """Renew the split of a name, after its versions, default or percentages have changed."""
        versions, percent = self._versions.get(name, {}), self._percent.pop(name, {})
        split = None
        if versions:
            default = self.find(name)
            mirrors = [model for model in versions.values() if model.mirror.percent]
            for model in [*mirrors, *(versions[version] for version in percent)]:
                if reason := obstacle(model, default):  # with the new default version
                    logger.warning("%s gets no part of the requests of %s any more: %s", model, default, reason)
                    percent.pop(model.version, None)
                    model.mirror.close()
            shares = {versions[version]: share for version, share in percent.items()}
            mirrored = [model.mirror for model in mirrors if model.mirror.percent]
            if shares or mirrored:
                split = TrafficSplit(default, shares, partial(self._may_answer, default), mirrored)
        if percent:
            self._percent[name] = percent
        for model in versions.values():
            model.split = split


def can_share(model: Model, default: Model) -> bool:
    """Whether a version can answer a request for the default one now."""
    return model.pool.can_answer and (not model.pool.has_loaded or default.abilities <= model.abilities)


def obstacle(model: Model, default: Model) -> str:
    """Why two versions cannot share requests; empty if they can."""
    if model.config.sequence_batching or default.config.sequence_batching:
        return "the requests of a sequence belong to one version (sequenceBatching); name the version in the path"
    if model.envelope != default.envelope:
        return f"their envelopes differ ({model.envelope or 'none'} and {default.envelope or 'none'})"
    if model.pool.has_loaded and default.pool.has_loaded and not default.abilities <= model.abilities:
        return f"version {model.version} cannot {', '.join(sorted(default.abilities - model.abilities))}"
    return ""


def check_name(name: str) -> None:
    """Reject a name or version that is too long, or has characters that would break a log, a metric or a header."""
    if len(name) > MAX_NAME:
        raise BadRequest(f"names and versions may have {MAX_NAME} characters; {name[:50]!r}… has {len(name)}")
    if not name.isprintable():
        raise BadRequest(f"names and versions may hold no control characters, as {name[:100]!r} does")


def check_encodable(handler: str, folder: str) -> None:
    """Reject a handler or folder that cannot be named in a message to a worker, or that no file can have."""
    if len(handler) > MAX_HANDLER or "\0" in handler or not is_text(handler):
        raise BrokenArchive(
            f"the handler {handler[:50]!r} is not valid: it must be text of at most {MAX_HANDLER} characters"
        )
    if not is_text(folder):
        raise BrokenArchive(f"the folder {folder!r} is not valid: its name is not UTF-8; rename it")


def is_text(name: str) -> bool:
    """Whether a name can be encoded; file names of other encodings, and half characters in JSON, cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def settings_of(
    server: ServerConfig, source: Source, name: str, config: ModelConfig, overrides: Mapping[str, Any], *, workers: bool
) -> ModelConfig:
    """The defaults, overridden by `models` of the server's configuration, the model's YAML and then `overrides`."""
    manifest = source.manifest or Manifest(model_name="")
    if settings := server.settings_of_model(name, manifest.version):
        config = config.with_settings(settings, workers=workers)
    if named := manifest.config_file:
        config = config.with_options(read_options(source.folder / named), f"{named} of {name}")
    return config.updated(overrides, "the server's start" if workers else "the register call")


def default_settings(server: ServerConfig, *, workers: int) -> ModelConfig:
    """What the server's configuration says of models that say nothing themselves."""
    plain, config = ServerConfig(), ModelConfig(min_workers=workers, max_workers=workers)
    settings = {
        "response_timeout_s": "default_response_timeout",
        "startup_timeout_s": "default_startup_timeout",
        "queue_size": "job_queue_size",
    }
    for name, setting in settings.items():
        field = f"default_{name}" if name.endswith("_s") else setting
        if (value := getattr(server, field)) != getattr(plain, field):
            config = config.updated({name: value}, f"the setting {setting}")
    return config


def check_runtime(runtime: str | None) -> None:
    if runtime not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")


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
    """The model of a source; raises if its name, handler or files are not usable."""
    manifest = source.manifest or Manifest(model_name="")
    if not name:
        cause = source.problem or explain_no_manifest(source.folder)
        if cause and not source.problem:  # another problem is logged already
            logger.warning("%r: %s", source.url, cause)
        raise BrokenArchive("Model name is not defined.", cause=cause)
    if (runtime or manifest.runtime) == "LSP":
        logger.warning("%s asks for the runtime LSP, a C++ backend, which is not supported; it runs in Python", name)
    check_name(name)
    check_name(manifest.version)
    registry.check_free(name, manifest.version)
    handler = handler or manifest.handler or host.config.default_handler
    check_encodable(handler or "", str(source.folder))
    if source.problem and settings.min_workers > 0:
        text = f"Failed to start workers for model {name} version: {manifest.version}"
        raise WorkersFailed(text, cause=source.problem)
    if not handler and not source.problem:
        text = f"model {name} names no handler; give one in its manifest, in the register call, or by default"
        raise BrokenArchive(text, cause=explain_no_manifest(source.folder))
    return Model(name, manifest.version, handler or "", source, settings, host)


def name_from(url: str) -> str:
    """The default name of a model: that of its file, with every other character than a word character replaced."""
    file = Path(url).name
    stem = next((file.removesuffix(suffix) for suffix in (".tar.gz", ".tgz") if file.endswith(suffix)), Path(file).stem)
    return re.sub(r"\W|^_", "_", stem)
