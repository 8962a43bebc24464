"""The models of a state file, registered again when a server starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flambeau.cli.startup_progress import StartupProgress
from flambeau.errors import FlambeauError, WorkersFailed
from flambeau.serving.model import Model
from flambeau.serving.model_sources.store import Source
from flambeau.serving.registry import Registry, default_settings
from flambeau.serving.saved_models import SavedModel
from flambeau.serving.server import Server

logger = logging.getLogger(__name__)


async def restore(server: Server, models: Sequence[SavedModel], file: Path) -> Sequence[Model]:
    """Register those that the command line has not; then their names get the defaults and percentages of the file.

    The workers of the models that are returned may still be starting.
    """
    for saved in models:
        if server.registry.has_version(*saved.key):
            logger.info("%s is named on the command line, which takes precedence over %s", saved.label, file)
        elif saved.key not in server.not_restored:
            logger.info("%s of %s is not restored: the command line no longer has %s", saved.label, file, saved.path)
    wanted = [saved for saved in models if saved.key in server.not_restored]
    if wanted:
        logger.info("restoring from %s: %s", file, ", ".join(saved.label for saved in wanted))
    registered = await asyncio.gather(*(register_or_keep(server, saved) for saved in wanted))
    for saved in models:
        if saved.is_default and server.registry.has_version(*saved.key):
            server.registry.set_default(*saved.key)
    for saved in models:
        set_share(server.registry, saved.name, saved.version, saved.traffic_percent, saved.max_errors)
    return [model for model in registered if model is not None]


async def register_or_keep(server: Server, saved: SavedModel) -> Model | None:
    """Register a model. One that cannot be registered stays in the file, and is shown as missing."""
    try:
        return await register(server, saved)
    except (FlambeauError, OSError) as error:
        text = error.with_reason if isinstance(error, FlambeauError) else str(error)
    except Exception as error:  # one broken model must not keep the others from being served
        logger.exception("%s cannot be restored", saved.label)
        text = f"{type(error).__name__}: {error}"
    if saved.key not in server.not_restored:  # it is registered, without workers
        logger.error("%s: %s", saved.label, text)
        return None
    remedy = f"the next start tries again; to forget it: {forget_command(saved)}"
    logger.error("%s could not be restored: %s; %s", saved.label, text, remedy)
    server.add_not_restored(saved, text)
    return None


async def wait_for(model: Model, progress: StartupProgress) -> None:
    """Wait for the workers of a model, and show the outcome."""
    with progress.loading(str(model)) as outcome:
        outcome.failed = not await has_workers(model)


def forget_command(saved: SavedModel) -> str:
    return f"flambeau models rm {saved.name} --version {saved.version}"


async def register(server: Server, saved: SavedModel) -> Model:
    """Register a model without waiting for its workers."""
    source = await downloaded(server, saved) if saved.is_downloaded else None
    model = await server.register(
        saved.url,
        path=Path(saved.path) if saved.path is not None and not saved.is_downloaded else None,
        name=saved.name,
        handler=saved.handler,
        config=default_settings(server.config, workers=saved.min_workers),
        overrides=saved.overrides,
        wait=False,
        at_startup=True,
        signed=saved.is_signed,
        source=source,
    )
    if model.version != saved.version:
        logger.warning("%s has version %s now, not %s", saved.url, model.version, saved.version)
        server.not_restored.pop(saved.key, None)
    return model


async def downloaded(server: Server, saved: SavedModel) -> Source | None:
    """The file that was downloaded, which is deleted with the model as before; None if it is gone."""
    file = saved.location(None)
    if file is None or not file.is_file():
        return None
    return replace(await asyncio.to_thread(server.store.open_path, file, saved.url), downloaded=file)


def set_share(registry: Registry, name: str, version: str, percent: int, max_errors: int | None = None) -> None:
    """Give a version the part of the requests that it had, if it can have it."""
    if percent and registry.has_version(name, version):
        try:
            registry.set_traffic(name, version, percent, max_errors)
        except FlambeauError as error:
            logger.warning("%s %s gets no part of the requests: %s", name, version, error)


async def has_workers(model: Model) -> bool:
    """Wait until a model's workers have started; log why if they failed."""
    try:
        await model.pool.wait_started(model.pool.min_workers)
    except WorkersFailed as error:
        if not error.is_final:  # a final error is logged by the supervisor
            logger.error("%s: %s; it will be tried again", error, error.cause.partition("\n")[0])
        return False
    return True
