"""The server process behind the `torchserve` command: settings, startup models, snapshots."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flambeau import __version__
from flambeau.cli.lifecycle import LifecycleHooks, mark_started, run_server
from flambeau.cli.restored_models import has_workers, set_share
from flambeau.config.model import ModelConfig
from flambeau.config.server import Address, ServerConfig
from flambeau.errors import CannotListen, FlambeauError, VersionNotFound
from flambeau.logs.console import Console
from flambeau.logs.setup import STDOUT, open_logs
from flambeau.logs.writer import Logs
from flambeau.serving.model import Model
from flambeau.serving.registry import default_settings
from flambeau.serving.server import Server
from flambeau.torchserve.command import config_file, flags_to_properties, named_config, parser, snapshot_folder
from flambeau.torchserve.config_properties import TORCHSERVE, Properties, merge_settings, read_file, to_properties
from flambeau.torchserve.log4j import open_log4j_logs
from flambeau.torchserve.log_messages import TorchServeEvents
from flambeau.torchserve.pid_file import PidFile
from flambeau.torchserve.snapshot import SnapshotWriter, read_snapshot
from flambeau.torchserve.startup_models import StartupModel, locate, named_models, saved_models

logger = logging.getLogger(__name__)


def main() -> None:
    """Serve until a signal; the first argument only marks the process in the process list."""
    gc.disable()  # until the server listens
    arguments = parser().parse_args(sys.argv[2:])
    status = 0
    logs: Logs | None = None
    try:
        config = base_config()
        log_config = arguments.log_config
        logs = open_log4j_logs(config, Path(log_config)) if log_config else open_logs(config, has_process=True)
        properties = settings(arguments)
        snapshots = None if arguments.no_config_snapshots else snapshot_folder()
        run_server(properties.server, Startup(properties, snapshots), logs, TorchServeEvents(logs))
    except CannotListen as error:
        print_line(f"Failed to bind to address: {error.address}")
        print_line(str(error))
        status = 1
    except FlambeauError as error:
        print_line(f"Invalid configuration: {error}")
        status = 1
    finally:
        PidFile(arguments.pid_file).remove(os.getpid())
        if logs is not None:
            logs.close()
    sys.exit(status)


def print_line(text: str) -> None:
    """Print a line that scripts wait for; a terminal that is closed or blocked is ignored."""
    Console(STDOUT).write(f"{text}\n".encode())


def base_config() -> ServerConfig:
    """TorchServe's defaults, with the log folders that the environment names."""
    return replace(
        TORCHSERVE,
        log_folder=Path(os.environ.get("LOG_LOCATION") or "logs"),
        metrics_log_folder=Path(os.environ.get("METRICS_LOCATION") or "logs"),
    )


def settings(arguments: argparse.Namespace) -> Properties:
    """The settings of the file or snapshot, overridden by the flags, overridden by the environment."""
    skipped = "the snapshot %s is not used: %s. The one before it is tried; delete the file to remove this warning"
    file = config_file(arguments, lambda path, problem: logger.warning(skipped, path, problem))
    written = read_file(file) if file else {}
    if file and file != named_config(arguments) and file.parent == snapshot_folder():
        logger.warning(
            "starting from the snapshot %s: config.properties and --models are not read. "
            "--ncs or --ts-config FILE starts without it",
            file,
        )
    for flag, value in (("--cpp-log-config", arguments.cpp_log_config), ("--plugins-path", arguments.plugins_path)):
        if value:
            logger.info("%s has no effect here: there is no C++ backend and no Java", flag)
    given = merge_settings(written, flags_to_properties(arguments))
    if file:
        given["tsConfigFile"] = str(file)
    given |= {"version": __version__, "python": sys.executable}
    properties = to_properties(given, base_config())
    logger.info("settings:\n%s", "\n".join(summary_of(properties, file)))
    return properties


def summary_of(properties: Properties, file: Path | None) -> list[str]:
    """The main settings, one per line, under TorchServe's names."""
    server = properties.server
    lines = {
        "Flambeau version": __version__,
        "Current directory": Path.cwd(),
        "Config file": file or "N/A",
        "Inference address": server.inference,
        "Management address": server.management,
        "Metrics address": server.metrics or "N/A",
        "gRPC addresses": f"{server.grpc.inference or 'N/A'}, {server.grpc.management or 'N/A'}",
        "Model Store": server.model_store or "N/A",
        "Workflow Store": server.workflow_store or server.model_store or "N/A",
        "Initial Models": "from the snapshot" if properties.model_snapshot else properties.load_models or "N/A",
        "Log dir": server.log_folder,
        "Metrics dir": server.metrics_log_folder,
        "Default workers per model": server.default_workers or "one per GPU, or one",
        "Maximum Response Size": server.max_response_bytes,
        "Maximum Request Size": server.max_request_bytes,
        "Allowed Urls": [*server.allowed_urls] or "none",
        "Metrics mode": server.measure.mode,
        "Token authorization": f"on; the keys are in {server.keys.file.absolute()}" if server.needs_keys else "off",
        "Model API enabled": str(server.model_api).lower(),
    }
    return [f"{name}: {value}" for name, value in lines.items()]


class Startup(LifecycleHooks):
    """Registers its models before the ports open, as TorchServe does, so that the first client finds them."""

    def __init__(self, properties: Properties, snapshot_folder: Path | None) -> None:
        self._properties = properties
        self._snapshot_folder = snapshot_folder
        self._models: list[Model] = []
        self._snapshots: SnapshotWriter | None = None

    async def before_listening(self, server: Server) -> None:
        """Register the models; one that fails is logged and skipped, and the server is not ready without it."""
        store = server.config.model_store or Path()
        models = await asyncio.to_thread(startup_models, self._properties, store)
        for wanted in models:
            logger.info("Loading initial models: %s", wanted.url)
            try:
                self._models.append(await register(server, wanted, store))
            except (FlambeauError, OSError) as error:
                text = error.with_reason if isinstance(error, FlambeauError) else str(error)
                logger.error("Failed to load model: %s: %s", wanted.url, text)
                server.add_missing_model(wanted.name or wanted.url, text)
            except Exception as error:  # one broken model must not keep the others from being served
                logger.exception("Failed to load model: %s", wanted.url)
                server.add_missing_model(wanted.name or wanted.url, f"{type(error).__name__}: {error}")
        for saved in (wanted.saved for wanted in models if wanted.saved):
            set_share(server.registry, saved.name, saved.version, saved.traffic_percent)

    async def after_listening(self, server: Server, address: Address) -> None:
        """Print the line that scripts wait for, then wait for the workers."""
        if self._snapshot_folder is not None:
            writer = self._snapshots = SnapshotWriter(self._snapshot_folder, self._properties.given, server)
            writer.save("startup")
            await writer.written()  # scripts look for it after the line below
            server.on_change = lambda: writer.save("snapshot")
            server.change_saved = writer.written  # a change that was answered survives a crash
        await asyncio.to_thread(server.logs.flush)  # so that the line comes after those before it
        print_line("Model server started.")
        await asyncio.gather(*map(has_workers, self._models))
        mark_started(server)

    async def after_closing(self, server: Server) -> None:
        """Write the final snapshot."""
        if self._snapshots is not None:
            self._snapshots.save("shutdown")
            await self._snapshots.close()


def startup_models(properties: Properties, store: Path) -> Sequence[StartupModel]:
    """The models to start with; a snapshot overrides a list."""
    if properties.model_snapshot is None:
        return named_models(properties.load_models or "", store)
    if properties.load_models:
        logger.info("load_models and --models are not read: the models are those of the snapshot")
    return saved_models(read_snapshot(properties.model_snapshot), store)


async def register(server: Server, wanted: StartupModel, store: Path) -> Model:
    """Register one model without waiting for its workers."""
    model = await server.register(
        wanted.url,
        path=await asyncio.to_thread(locate, wanted.url, store),
        name=wanted.name,
        config=defaults(server.config, num_gpus=server.num_gpus),
        overrides=wanted.settings,
        wait=False,
        at_startup=wanted.saved is None,
    )
    if wanted.saved and wanted.saved.is_default:
        try:
            server.registry.set_default(model.name, wanted.saved.version)
        except VersionNotFound:
            logger.warning("%s is version %s, not %s", wanted.url, model.version, wanted.saved.version)
    return model


def defaults(config: ServerConfig, *, num_gpus: int) -> ModelConfig:
    """The settings of a model without any: one worker per GPU, or one, where TorchServe started one per core."""
    workers = config.default_workers or num_gpus or 1
    return default_settings(config, workers=workers)


if __name__ == "__main__":
    main()
