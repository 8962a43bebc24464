"""`flambeau serve`: finds the models of its paths, and loads them when the server listens."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from flambeau.archive.manifest import CONFIG, MANIFEST, MODEL_SUFFIXES, explain_folder, handler_of, read_config
from flambeau.archive.packages import explain_missing
from flambeau.archive.pretrained import (
    check_weights,
    choose_handler,
    configured_task,
    is_pretrained,
    read_document,
    reject_unsupported_form,
)
from flambeau.cli.lifecycle import LifecycleHooks, mark_started, run_server
from flambeau.cli.restored_models import restore, wait_for
from flambeau.cli.startup_progress import StartupProgress
from flambeau.config.resolution import Settings, to_server_config
from flambeau.config.server import Address, ServerConfig, Tls
from flambeau.config.settings import MODEL_SETTINGS, SERVE
from flambeau.config.value_types import ModelEntry
from flambeau.errors import ConfigError, FlambeauError, MissingPackages, WorkersFailed
from flambeau.frontend.authorization import Keys
from flambeau.logs.setup import open_logs
from flambeau.serving.model import Model
from flambeau.serving.model_sources.hub import fetch, read_hub_name
from flambeau.serving.model_sources.store import ARCHIVE_SUFFIXES, models_in
from flambeau.serving.registry import default_settings
from flambeau.serving.saved_models import SavedModel
from flambeau.serving.server import Server
from flambeau.serving.state_file import StateFile

logger = logging.getLogger(__name__)

ENTRY = "models in the configuration file"
MODEL_FIELDS = {  # of ModelConfig, by the setting of `flambeau serve`
    "workers": ("min_workers", "max_workers"),
    "batch_size": ("batch_size",),
    "max_batch_delay": ("batch_delay_s",),
    "response_timeout": ("response_timeout_s",),
    "startup_timeout": ("startup_timeout_s",),
}
PRETRAINED_TIMEOUT_S = 1200.0  # large checkpoints take minutes to read


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOverrides:
    """Options of the command line that apply to every initial model."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # take precedence over model-config.yaml
    default_workers: int = 1
    name: str | None = None
    handler: str | None = None
    must_load: bool = False  # stop the server if a model cannot be loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """A model to load when the server starts."""

    path: Path
    name: str | None = None
    handler: str | None = None
    url: str | None = None  # shown as its origin, instead of the name of the path
    is_required: bool = True  # on the command line, not only found in a store
    startup_timeout_s: float = 0.0  # at least; the server's default may be longer
    settings: Mapping[str, Any] = field(default_factory=dict)  # take precedence over model-config.yaml


def serve_settings(settings: Settings) -> None:
    """Serve the models of the settings until a signal; without any and without a model store, the examples."""
    entries: Sequence[ModelEntry] = settings["models"] or ()
    config = to_server_config(settings, SERVE)
    config = replace(config, model_store=find_store([entry.path for entry in entries], config.model_store))
    named = [(entry.path, to_overrides(settings, entry.settings)) for entry in entries]
    serve(
        config,
        named,
        to_overrides(settings),
        log_level=settings["log_level"],
        warnings=settings.warnings,
        state=settings["state"],
    )


def serve(
    config: ServerConfig,
    named: Sequence[tuple[Path, ModelOverrides]],
    overrides: ModelOverrides,
    *,
    log_level: str,
    warnings: Sequence[str] = (),
    state: Path | None = None,
) -> None:
    """Serve models, each with its options; `overrides` are those of the examples, and of the server's start.

    `state` is the file that keeps the models for the next start.
    """
    logs = open_logs(config, log_level, has_process=True)
    for warning in warnings:
        logger.warning(warning)
    try:
        kept = None if state is None else StateFile(state)
        models = [model for path, own in named for model in find_models(path, own)]
        if not named and config.model_store is None and not (kept and kept.has_registered):
            models = [*example_models(overrides)]
        run_server(config, InitialModelLoader(models, overrides, kept), logs)
    except MissingPackages:  # the log already has the reasons
        sys.exit(1)
    except FlambeauError as error:
        if config.log_format != "json":
            raise
        logger.critical("%s", error, exc_info=not isinstance(error, ConfigError))
        logs.close()
        sys.exit(1)


def to_overrides(
    settings: Settings, entry: Mapping[str, Any] | None = None, *, must_load: bool = False
) -> ModelOverrides:
    """The settings of an initial model. Its own, in the configuration file, give way to a flag or variable."""
    held = {name: settings[name] for one in MODEL_SETTINGS if (name := one.name) in settings.held}
    own = {name: value for name, value in (entry or {}).items() if not settings.is_forced(name)}
    given = {**held, **own}
    sources = {name: ENTRY if name in own else settings.held[name].source for name in given}
    return ModelOverrides(
        settings=to_model_settings(given, sources),
        name=given["name"],
        handler=given.get("handler"),
        must_load=must_load,
    )


def to_model_settings(given: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a model as fields of ModelConfig, with their origins; those that are None are left out."""
    origins = {field: sources[name] for name, fields in MODEL_FIELDS.items() for field in fields if name in sources}
    changes = {field: given[name] for name, fields in MODEL_FIELDS.items() for field in fields}
    if changes["batch_delay_s"] is not None:
        changes["batch_delay_s"] /= 1000
    changes = {field: value for field, value in changes.items() if value is not None}
    return {**changes, "origins": {field: origins[field] for field in changes}} if changes else {}


class InitialModelLoader(LifecycleHooks):
    """Loads the initial models after the ports have opened; probes show when they are ready."""

    def __init__(
        self, models: Sequence[InitialModel], overrides: ModelOverrides, state: StateFile | None = None
    ) -> None:
        self._models = models
        self._overrides = overrides
        self._state = state

    async def before_listening(self, server: Server) -> None:
        if self._state is not None:
            self._models, wanted = divide(self._models, self._state.models, server.config.model_store)
            self._state.follow(server, wanted)

    async def after_closing(self, server: Server) -> None:
        if self._state is not None:
            await self._state.close()

    async def after_listening(self, server: Server, address: Address) -> None:
        for model in self._models:
            logger.info("Loading initial models: %s", model.name or model.path.name)
        progress = StartupProgress.for_terminal(is_plain=server.config.log_format == "json")
        server.on_progress = progress.note
        with progress:
            loading = (load(server, model, self._overrides, progress, i) for i, model in enumerate(self._models))
            await asyncio.gather(*loading)
            if self._state is not None:
                restored = await restore(server, self._state.models, self._state.path)
                self._state.start_saving()
                await asyncio.gather(*(wait_for(model, progress) for model in restored))
            if self._overrides.must_load:
                loaded = [model for model in server.registry if model.loaded_at_startup]
                await asyncio.gather(*(model.pool.wait_decided() for model in loaded))
        check_any_served(server)
        mark_started(server)
        logger.info("Model server started.")
        options = [authorization_option(self.keys)] if self.keys is not None else []
        if address.is_tls and server.config.tls == Tls():
            options.insert(0, "-k")  # the certificate is the server's own
        ready = [model for model in server.registry if model.pool.is_ready and server.registry.is_default(model)]
        progress.announce(address, ready, " ".join(options))


def divide(
    models: Sequence[InitialModel], saved: Sequence[SavedModel], store: Path | None
) -> tuple[Sequence[InitialModel], Sequence[SavedModel]]:
    """Those to load as the command line has them, and those to restore as the file has them.

    A model that the command line names is loaded; one that is only found in a folder there, and is in the file, is
    restored, with the settings of the command line over it. What was on an earlier command line and is no longer on
    this one is neither.
    """
    places = {one.key: location.resolve() for one in saved if (location := one.location(store)) is not None}
    found = {model.path.resolve(): model for model in models if not model.is_required}
    wanted = [
        one if (model := found.get(places.get(one.key, Path()))) is None else with_overrides(one, model)
        for one in saved
        if not one.is_initial or places[one.key] in found
    ]
    restored = {places[one.key] for one in wanted if one.key in places}
    return [model for model in models if model.is_required or model.path.resolve() not in restored], wanted


def with_overrides(saved: SavedModel, initial: InitialModel) -> SavedModel:
    """A saved model with what the options of the command line say."""
    settings = {name: value for name, value in initial.settings.items() if name != "origins"}
    return msgspec.structs.replace(saved, handler=initial.handler or saved.handler, **settings)


def authorization_option(keys: Keys) -> str:
    """The option of a curl command that sends the inference key; the key itself is not printed."""
    if keys.file is None or "inference" in keys.supplied:
        return '-H "Authorization: Bearer $FLAMBEAU_INFERENCE_KEY"'
    return f'-H "Authorization: Bearer $(flambeau keys show inference --file {shlex.quote(str(keys.file.resolve()))})"'


def check_any_served(server: Server) -> None:
    """Raise if there are models, and all of them wait for packages that are not installed."""
    models = [*server.registry]
    if models and all(model.pool.needs_install for model in models):
        raise MissingPackages("no model can be served: see the log for the packages to install")


async def load(
    server: Server, initial: InitialModel, overrides: ModelOverrides, progress: StartupProgress, place: int
) -> Model | None:
    """Register one model. If its workers fail, it stays registered and is retried unless the failure is final."""
    name = initial.name or initial.path.name
    config = default_settings(server.config, workers=overrides.default_workers)
    if initial.startup_timeout_s > config.startup_timeout_s:
        config = config.updated({"startup_timeout_s": initial.startup_timeout_s}, "the default of checkpoints")
    with progress.loading(name) as outcome:
        try:
            return await server.register(
                initial.url or initial.path.name,
                path=initial.path,
                name=initial.name,
                handler=initial.handler,
                config=config,
                overrides=initial.settings,
                at_startup=True,
                place=place,
            )
        except WorkersFailed as error:
            outcome.failed = True
            if not error.is_final:  # a final failure is already logged
                logger.error("%s: %s; it will be tried again", error, error.cause.partition("\n")[0])
        except (FlambeauError, OSError) as error:
            outcome.failed = True
            if initial.is_required:
                raise
            text = error.with_reason if isinstance(error, FlambeauError) else str(error)
            logger.error("%s was not loaded: %s", initial.path.name, text)
            server.add_missing_model(initial.path.name, text)
    return None


def find_models(path: Path, overrides: ModelOverrides) -> Iterator[InitialModel]:
    """The models of a path on the command line, with these options: one, or those of a store; or one of the hub."""
    yield from (replace(model, settings=overrides.settings) for model in models_at(path, overrides))


def models_at(path: Path, overrides: ModelOverrides) -> Iterator[InitialModel]:
    if not (path.is_dir() and has_handler(path)):
        reject_unsupported_form(path)
    if hub_name := read_hub_name(path):
        folder = fetch(hub_name)
        model = pretrained(folder, overrides.name or hub_name.model_name, overrides)
        yield replace(model, url=f"{hub_name.repo}@{folder.name}")  # the commit, whatever was named
    elif not path.exists():
        raise ConfigError(
            f"{path} does not exist; give a handler file, a model file, an archive, a model folder, a store or a "
            "model of the Hugging Face hub (org/name)"
        )
    elif not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is neither a file nor a folder, but a device or a pipe; give a file or a folder")
    elif path.suffix == ".py":
        yield InitialModel(path=path, name=overrides.name or path.stem, handler=overrides.handler or path.name)
    elif path.suffix in MODEL_SUFFIXES:
        yield InitialModel(path=path, name=overrides.name or path.stem, handler=overrides.handler)
    elif path.is_file() and not path.name.endswith(ARCHIVE_SUFFIXES):
        raise ConfigError(
            f"{path} is not a handler file (.py), not a model file ({', '.join(MODEL_SUFFIXES)}) and not an archive "
            f"({', '.join(ARCHIVE_SUFFIXES)})"
        )
    elif path.is_file() or (path / MANIFEST).is_file():
        yield InitialModel(path=path, name=overrides.name, handler=overrides.handler)
    elif is_pretrained(path) and not has_handler(path):
        yield pretrained(path, overrides.name or path.resolve().name, overrides)
    elif is_model(path) or (overrides.handler and not models_in(path)):
        named = handler_of(read_config(path)) if (path / CONFIG).is_file() else None
        own = "handler.py" if named is None and (path / "handler.py").is_file() else None
        name = overrides.name or path.resolve().name
        yield InitialModel(path=path, name=name, handler=overrides.handler or own)
    else:
        found = models_in(path)
        if not found:
            read_document(path / "config.json")  # raises for one that cannot be read: the folder is meant as a model
            text = "%s. It is used as a model store without models: register them while the server runs"
            logger.warning(text, explain_folder(path))
        yield from (InitialModel(path=model, is_required=False) for model in found)


def pretrained(folder: Path, name: str, overrides: ModelOverrides) -> InitialModel:
    """The model of a Hugging Face folder; the handler that serves it is logged with the reason."""
    if overrides.handler is not None:
        return InitialModel(path=folder, name=name, handler=overrides.handler)
    options = read_config(folder) if (folder / CONFIG).is_file() else {}
    chosen = choose_handler(folder, configured_task(options))
    check_weights(folder)
    logger.info("%s is served by %s: %s", name, f"{chosen.handler} {chosen.task}".strip(), chosen.reason)
    section = options.get("handler")
    is_trusted = isinstance(section, Mapping) and section.get("trust_remote_code") is True
    if "auto_map" in read_document(folder / "config.json") and not is_trusted:
        logger.warning("%s names code of its own (auto_map), which is not run: trust_remote_code is off", name)
    return InitialModel(path=folder, name=name, handler=chosen.handler, startup_timeout_s=PRETRAINED_TIMEOUT_S)


def has_handler(folder: Path) -> bool:
    """Whether a folder names its own handler, so that config.json is the handler's business."""
    if any((folder / name).is_file() for name in (MANIFEST, "handler.py")):
        return True
    return (folder / CONFIG).is_file() and handler_of(read_config(folder)) is not None


def example_models(overrides: ModelOverrides) -> Iterator[InitialModel]:
    """The built-in examples whose packages are installed: an image model and a language model."""
    from flambeau.examples import digits, storyteller

    digits_lack, storyteller_lacks = digits.missing(), storyteller.missing()
    if digits_lack and storyteller_lacks:
        modules = [*dict.fromkeys((*digits_lack, *storyteller_lacks))]
        text = explain_missing("the example", modules, "example,llm")
        raise ConfigError(f"{text}. Or give a model to serve: flambeau serve PATH")
    if digits_lack:
        logger.warning(explain_missing("the example image model", digits_lack, "example"))
    else:
        yield InitialModel(path=digits.FOLDER, name=digits.NAME, handler="handler.py", settings=overrides.settings)
    if storyteller_lacks:
        logger.warning(explain_missing("the example language model", storyteller_lacks, "llm"))
    else:
        yield InitialModel(path=storyteller.FOLDER, name=storyteller.NAME, settings=overrides.settings)


def find_store(paths: Sequence[Path], configured: Path | None) -> Path | None:
    """The model store: the configured one, or the first store among the paths."""
    return configured or next((path for path in paths if path.is_dir() and not is_model(path)), None)


def is_model(folder: Path) -> bool:
    """Whether a folder is a model, not a store of models."""
    return any((folder / name).is_file() for name in (MANIFEST, "handler.py", CONFIG)) or is_pretrained(folder)
