"""Server: the methods that every API calls; starts and stops models in order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pkgutil
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from flambeau.archive.manifest import requirements_in
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig, check_cluster
from flambeau.errors import BadRequest, ConfigError, DeadlinePassed, ModelExists, WorkersFailed
from flambeau.logs.access_log import AccessLog
from flambeau.logs.writer import Logs
from flambeau.metrics.system import process_metrics
from flambeau.serving.crash_bundles import CrashBundles, default_folder
from flambeau.serving.events import ServerEvents
from flambeau.serving.key_metrics import key_metrics
from flambeau.serving.model import Given, Model
from flambeau.serving.model_metrics import model_metrics
from flambeau.serving.model_sources.dependencies import Dependencies
from flambeau.serving.model_sources.downloader import FILE_LIMITS, Downloader, DownloadLimits, shown
from flambeau.serving.model_sources.store import Source, Store
from flambeau.serving.model_sources.urls import compile_patterns
from flambeau.serving.registry import Registry, check_runtime, name_from, new_model, settings_of
from flambeau.serving.saved_models import Key, SavedModel
from flambeau.serving.server_extensions import EXTENSIONS, Extension
from flambeau.serving.server_metrics import HostMetricsReader
from flambeau.serving.telemetry import Telemetry
from flambeau.serving.tenants import Tenant
from flambeau.serving.traces import open_tracing
from flambeau.serving.workers.host_resources import count_cores, count_gpus
from flambeau.serving.workers.launcher import Launcher
from flambeau.serving.workers.ranks import RendezvousPorts
from flambeau.serving.workers.worker_factory import Host
from flambeau.wire.messages import Shared
from flambeau.wire.shared_memory import Segment, SegmentPool

if TYPE_CHECKING:
    from flambeau.serving.cluster.cluster import Cluster

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02


async def nothing_to_save() -> None:
    """The default of `change_saved`."""


class Server:
    """One serving process: registers models, finds them for requests, and reports its state."""

    def __init__(
        self,
        config: ServerConfig,
        logs: Logs | None = None,
        *,
        events: ServerEvents | None = None,
        extensions: Sequence[str] = EXTENSIONS,
    ) -> None:
        try:
            re.compile(config.hidden_env)
        except re.error as error:
            raise ConfigError(f"blacklist_env_vars is not a regular expression: {error}") from None
        self.config = config
        self.registry = Registry(suggests=config.suggests_names, on_rollback=lambda: self.on_change())
        self.events = events or ServerEvents()
        self.logs = logs or Logs()
        self.access_log = AccessLog(self.logs, is_full=config.full_access_log) if self.logs.has_access_log else None
        self.telemetry = Telemetry(config.measure, self.logs)
        self.tracing = open_tracing(is_on=config.tracing.is_on, sampling=config.tracing.sampling)
        downloader = Downloader(
            compile_patterns(config.allowed_urls),
            allow_private=config.allow_private_urls,
            limits=DownloadLimits(min_rate=config.min_download_rate),
        )
        # For files in chats, by their kinds: those who send them are not those who may register models.
        file_urls = downloader.allowed if config.files_from_urls else ()
        self.file_downloaders = {
            kind: Downloader(file_urls, allow_private=False, limits=limits) for kind, limits in FILE_LIMITS.items()
        }
        self.store = Store(config.model_store, downloader, exact_paths=config.exact_paths)
        self.extensions: list[Extension] = [pkgutil.resolve_name(name)(self) for name in extensions]
        self.on_progress: Callable[[str, str], None] = lambda model, words: None  # (model, message) of a long operation
        self._dependencies = Dependencies(
            install=config.install_dependencies,
            tell=lambda model, words: self.on_progress(model, words),
            ignore_shared_pins=config.ignore_shared_pins,
        )
        self.crash_bundles = CrashBundles(
            config.crash_folder or default_folder(config.log_folder),
            num_kept=config.crash_bundles,
            with_payloads=config.crash_payloads,
        )
        self.tenants: Iterable[Tenant] = ()  # those who have keys
        self.segments: SegmentPool | None = None
        self.cluster: Cluster | None = None
        self.is_draining = False
        self.missing: dict[str, str] = {}  # startup models that could not be registered, and why
        self.not_restored: dict[Key, SavedModel] = {}  # of the state file, which keeps them
        self.has_started = False  # the startup models have loaded or failed
        self.on_change: Callable[[], None] = lambda: None  # called after models, versions or worker numbers changed
        self.change_saved: Callable[[], Awaitable[None]] = nothing_to_save  # waits for what `on_change` has started
        self._is_late = False  # the drain timed out
        self._probe: Segment | None = None
        self._host: Host | None = None
        self._watching: HostMetricsReader | None = None

    async def __aenter__(self) -> Self:
        if SegmentPool.is_supported() and self.config.worker_transport == "unix":
            self.segments = SegmentPool()
            self._probe = self.segments.take(1)
        gpus = range(await asyncio.to_thread(count_gpus))
        if self.config.number_of_gpus is not None:
            gpus = gpus[: self.config.number_of_gpus]
        launcher = Launcher(count_cores())
        if self.config.cluster.manager:
            check_cluster(self.config)
            from flambeau.serving.cluster.cluster import Cluster  # here: few servers have one

            self.cluster = Cluster(self.config.cluster, launcher)
            await self.cluster.open()
        self._host = Host(
            config=self.config,
            gpus=gpus,
            worker_ids=itertools.count(self.config.first_worker_id),
            rendezvous_ports=RendezvousPorts(self.config.first_distribution_port),
            launcher=launcher,
            cluster=self.cluster,
            free_memory=self._free_memory,
            telemetry=self.telemetry,
            logs=self.logs,
            events=self.events,
            crash_bundles=self.crash_bundles,
            probe=self._describe_probe,
            devices_in_use=lambda: (d for model in self.registry for slot in model.pool.slots for d in slot.devices),
        )
        self._watching = HostMetricsReader(self.config.measure, self.telemetry, self._worker_pids)
        self._watching.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(now=error is not None)
        if self._watching is not None:
            await self._watching.stop()
        if self.cluster is not None:
            await self.cluster.close()
        if self._host is not None:
            await asyncio.to_thread(self._host.launcher.close)
        await asyncio.to_thread(self.crash_bundles.close)
        if self.tracing is not None:
            await self.tracing.close()

    # ---- models ----

    async def register(
        self,
        url: str,
        *,
        path: Path | None = None,
        name: str | None = None,
        handler: str | None = None,
        runtime: str | None = None,
        config: ModelConfig,
        overrides: Mapping[str, Any] | None = None,
        wait: bool = True,
        at_startup: bool = False,
        place: int | None = None,
        signed: bool = False,
        source: Source | None = None,
        workflow: str = "",
    ) -> Model:
        """Register the model at `url`, or at a `path` that the operator named, and start its workers.

        `config` holds the defaults; the model's YAML takes precedence over them, and `overrides` over both. With
        `wait`, a worker that cannot start unregisters the model and raises WorkersFailed. `place` is that of a startup
        model among the others, of which several may be registered at the same time. `workflow` names the workflow that
        the model is a node of; a node that is a function has a `source` instead of a URL, as has a restored download.
        """
        check_runtime(runtime)  # before anything is downloaded
        is_given = source is not None
        if path:
            source = await asyncio.to_thread(self.store.open_path, path, url, keep_broken=not at_startup)
        elif source is None:
            source = await self.store.open(url, signed=signed, reuse=at_startup)
        try:
            name = name or (source.manifest.model_name if source.manifest else "")
            if at_startup and not name:
                name = name_from(url)
            # In a thread: parsing an archive's YAML may be slow.
            settings = await asyncio.to_thread(
                settings_of, self.config, source, name, config, overrides or {}, workers=at_startup
            )
            model = await self._new_model(source, name, handler, runtime, settings)
            model.loaded_at_startup = at_startup
            model.workflow = workflow
            model.given = Given(url=url, path=path, handler=handler, is_signed=signed)
            self.registry.add(model, place)
            self._drop_missing(model.name, url)
            self._drop_not_restored(model.name, model.version)
        except ModelExists:  # keep the downloaded file: a retry must report the same conflict
            await asyncio.to_thread(self.store.discard, replace(source, downloaded=None))
            raise
        except BaseException:  # a file that was downloaded for an earlier start is needed by the next one
            await asyncio.to_thread(self.store.discard, replace(source, downloaded=None) if is_given else source)
            raise
        logger.info("registered %s from %s", model, shown(url))
        if self.config.watch and source.is_temporary:
            logger.warning("%s is served from an archive, which is not watched; serve its folder instead", model)
        await self._start_workers(model, wait=wait, at_startup=at_startup)
        self.on_change()
        return model

    async def _new_model(
        self, source: Source, name: str, handler: str | None, runtime: str | None, settings: ModelConfig
    ) -> Model:
        """A model that is not registered yet, with the Python environment of its requirements."""
        assert self._host is not None
        model = new_model(
            source,
            name=name,
            handler=handler,
            runtime=runtime,
            settings=settings,
            registry=self.registry,
            host=self._host,
        )
        requirements = source.manifest.requirements_file if source.manifest else None
        if source.manifest is None and not source.is_temporary:  # a folder; an archive names what it needs
            requirements = requirements_in(source.folder)
        environment = self._dependencies.prepare(model.name, source.folder, requirements, use_venv=settings.use_venv)
        model.use_environment(await environment)
        return model

    async def _start_workers(self, model: Model, *, wait: bool, at_startup: bool) -> None:
        if model.config.min_workers == 0:
            model.report_loaded()
            return
        try:
            await model.scale(model.config.min_workers, model.config.max_workers, wait=wait)
        except WorkersFailed:
            if not at_startup:  # a startup model stays, and the server is not ready without it
                await self._forget(model)
            raise

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Remove a model after its accepted jobs are answered; or accept that a startup model is missing."""
        if not self.registry.has_version(name, version) and self._drop_not_restored(name, version):
            logger.info("%s could not be restored when the server started; it is no longer kept", name)
            self.on_change()
            return
        if self.registry.has(name) or not self._drop_missing(name):
            model = self.registry.remove(name, version)
        else:
            logger.info("%s could not be registered when the server started; it no longer counts as missing", name)
            return
        try:
            async with asyncio.timeout(self.config.unregister_timeout_s):
                await self._retire(model)
        except TimeoutError:
            await self._drop(model, f'Model "{name}" is being unregistered.')
            self.on_change()
            raise DeadlinePassed(f"Timed out while cleaning resources: {name}") from None
        logger.info("unregistered %s", model)
        self.on_change()

    def set_default(self, name: str, version: str) -> None:
        """Use this version for requests that name none."""
        self.registry.set_default(name, version)
        for key, saved in self.not_restored.items():
            if saved.name == name:
                self.not_restored[key] = msgspec.structs.replace(saved, is_default=False)
        self.on_change()

    def set_traffic(self, name: str, version: str, percent: int, max_errors: int | None = None) -> None:
        """Give a version this percentage of the requests that name none, until it has too many errors."""
        self.registry.set_traffic(name, version, percent, max_errors)
        logger.info("%s %s gets %d %% of the requests that name no version", name, version, percent)
        self.on_change()

    def set_mirror(self, name: str, version: str, percent: int) -> None:
        """Send a version copies of this percentage of the default's requests."""
        self.registry.set_mirror(name, version, percent)
        logger.info("%s %s gets copies of %d %% of the requests that name no version", name, version, percent)

    async def scale(self, name: str, version: str | None, minimum: int, maximum: int, *, wait: bool) -> Model:
        """Change the number of workers of a model."""
        if maximum < minimum:
            raise BadRequest("max_worker cannot be less than min_worker.")
        if minimum < 0:
            raise BadRequest(f"min_worker is {minimum}; it cannot be less than 0.")
        model = self.registry.find(name, version)
        await model.scale(minimum, maximum, wait=wait)
        self.on_change()
        return model

    def _free_memory(self) -> bool:
        """Put the idle model to sleep that was used least recently; False if no model may sleep."""
        idle = [
            model
            for model in self.registry
            if model.pool.limits.allow_sleep and model.pool.has_ready and not model.num_in_flight
        ]
        oldest = min(idle, key=lambda model: model.scaler.last_arrival, default=None)
        if oldest is not None:
            logger.info("out of memory for another model: putting %s to sleep", oldest)
            oldest.scaler.sleep()
        return oldest is not None

    async def _forget(self, model: Model) -> None:
        self.registry.discard(model)
        self.on_change()
        await self._drop(model, f'The workers of model "{model.name}" could not start.')

    async def _retire(self, model: Model) -> None:
        while model.num_in_flight and model.pool.may_recover:
            await asyncio.sleep(DRAIN_POLL_S)
        await self._drop(model, f'Model "{model.name}" is being unregistered.', now=False)

    async def _drop(self, model: Model, reason: str, *, now: bool = True) -> None:
        try:
            await model.close(reason, now=now)
        finally:
            await asyncio.to_thread(self.store.discard, model.source)

    # ---- state ----

    @property
    def num_gpus(self) -> int:
        """GPUs available to workers."""
        return len(self._host.gpus) if self._host is not None else 0

    @property
    def is_healthy(self) -> bool:
        """Whether the default version of every model has its workers, including those that load or restart."""
        return all(model.pool.is_healthy for model in self.registry.defaults())

    @property
    def is_ready(self) -> bool:
        """Whether every model that should have workers can answer now. Startup models that could not be loaded count,
        unless the operator allows that.
        """
        if not self.has_started or self.is_draining:
            return False
        if self.config.allow_missing:
            return all(model.was_never_loaded for model in self.not_ready())
        return not self.missing and not self.not_ready()

    def add_missing_model(self, name: str, reason: str) -> None:
        """Record that a startup model could not be registered; the server is not ready without it."""
        self.missing[name] = reason

    def _drop_missing(self, *names: str) -> bool:
        """Forget a missing startup model by its name, by its file or by the file's name; whether there was one."""
        known = {Path(name).name for name in names}
        found = [name for name in self.missing if not known.isdisjoint((name, Path(name).name, name_from(name)))]
        for name in found:
            del self.missing[name]
        return bool(found)

    def add_not_restored(self, saved: SavedModel, reason: str) -> None:
        """Record that a model of the state file could not be registered; it stays there and counts as missing."""
        self.not_restored[saved.key] = saved
        self.missing[saved.label] = reason

    def _drop_not_restored(self, name: str, version: str | None) -> bool:
        """Forget models of the state file that were not restored; whether there was one."""
        found = [key for key in self.not_restored if key[0] == name and version in (None, key[1])]
        for key in found:
            self.missing.pop(self.not_restored.pop(key).label, None)
        return bool(found)

    def not_ready(self) -> list[Model]:
        """The models that should be able to answer but are not."""
        return [model for model in self.registry if model.pool.min_workers > 0 and not model.pool.is_ready]

    def metrics_text(self, wanted: Collection[str] = (), *, is_open: bool = False) -> str:
        """The text of the metrics endpoint: the wanted metrics, or all; as OpenMetrics or Prometheus' own format."""
        models = [*self.registry]
        workers = [slot.worker for model in models for slot in model.pool.slots if slot.worker]
        load_times = [(worker.spec.name, worker.load_s) for worker in workers if worker.load_s is not None]
        own = [*model_metrics(models, vllm_names=self.config.measure.vllm_names), *process_metrics()]
        own += key_metrics(self.tenants)
        return self.telemetry.text([model.traffic for model in models], load_times, own, wanted, is_open=is_open)

    def _worker_pids(self) -> list[int]:
        slots = (slot for model in self.registry for slot in model.pool.slots)
        return [pid for slot in slots if slot.worker for pid in slot.worker.local_pids]

    # ---- stopping ----

    async def drain(self, deadline: float) -> None:
        """Wait until every accepted job is answered, or until `deadline` on the event loop's clock."""
        for model in self.registry:
            model.mirror.close()
        for downloader in self.file_downloaders.values():
            downloader.stop()
        self.store.downloader.stop()  # registrations that wait for a download fail now
        try:
            async with asyncio.timeout_at(deadline):
                while any(extension.num_running for extension in self.extensions) or any(
                    model.num_owed and model.pool.may_recover for model in self.registry
                ):
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            self._is_late = True
            left = sum(model.num_owed for model in self.registry)
            logger.warning("%d jobs were not answered within %g s", left, self.config.drain_timeout_s)

    async def _close(self, *, now: bool) -> None:
        now = now or self._is_late
        for downloader in self.file_downloaders.values():
            await downloader.close()
        await self.store.downloader.close()
        models = [*self.registry]
        closing = (model.close("The server is stopping.", now=now) for model in models)
        for model, error in zip(models, await asyncio.gather(*closing, return_exceptions=True), strict=True):
            if error is not None:  # go on: other models and all files remain to be closed
                logger.error("%s could not be closed", model, exc_info=error)
        await asyncio.to_thread(self.store.close)
        for extension in self.extensions:
            await extension.close()
        if self.segments is not None:
            if self._probe is not None:
                self._probe.close()
            self.segments.close()

    def _describe_probe(self) -> Shared | None:
        return self._probe.describe(1) if self._probe is not None else None
