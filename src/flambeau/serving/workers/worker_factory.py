"""WorkerFactory: creates the workers of a model with their files, devices and environment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from flambeau.archive.packages import missing_packages
from flambeau.config.model import ModelConfig
from flambeau.config.placement import PlacementSettings
from flambeau.config.server import ServerConfig
from flambeau.errors import MissingPackages
from flambeau.logs.writer import Logs
from flambeau.metrics.definitions import Sample
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.crash_bundles import CrashBundles
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents, WorkerRef
from flambeau.serving.job import Job
from flambeau.serving.model_sources.dependencies import SERVER_ENVIRONMENT
from flambeau.serving.model_sources.store import Source
from flambeau.serving.slow_requests import SlowRequests
from flambeau.serving.telemetry import Telemetry
from flambeau.serving.workers.device_allocator import DeviceAllocator, threads_per_worker
from flambeau.serving.workers.health import StepTimes
from flambeau.serving.workers.host_resources import count_cores
from flambeau.serving.workers.launcher import Launcher
from flambeau.serving.workers.ranks import RendezvousPorts
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Slot
from flambeau.serving.workers.worker_life import Placer
from flambeau.serving.workers.worker_output import WorkerOutput
from flambeau.serving.workers.worker_process import WorkerSpec, environment_for
from flambeau.wire.messages import Load, Samples, Shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the models of one server share: settings, devices, worker ids, metrics and logs."""

    config: ServerConfig
    gpus: range
    worker_ids: Iterator[int]
    rendezvous_ports: RendezvousPorts
    launcher: Launcher
    free_memory: Callable[[], bool]  # stop an idle model; whether there was one
    telemetry: Telemetry
    logs: Logs
    events: ServerEvents
    crash_bundles: CrashBundles
    probe: Callable[[], Shared | None]
    devices_in_use: Callable[[], Iterator[int | None]]
    cluster: Placer | None = None  # other machines


class WorkerFactory:
    """Creates the slots and workers of one model."""

    def __init__(self, name: str, version: str, handler: str, source: Source, config: ModelConfig, host: Host) -> None:
        self._name = name
        self._version = version
        self._handler = handler
        self._source = source
        self._host = host
        self._num_cores = count_cores()
        self._cluster = host.cluster
        self._settings = config.cluster or PlacementSettings()
        if self._cluster is None and config.cluster is not None:
            text = "%s: cluster in its model-config.yaml is ignored: the server has no cluster (--cluster)"
            logger.info(text, name)
        is_placed = self._cluster is not None
        self._devices = DeviceAllocator(
            name, config, host.gpus, host.devices_in_use, host.rendezvous_ports, is_placed=is_placed
        )
        self.config = self._devices.config
        self.environment = SERVER_ENVIRONMENT

    def at_most(self, number: int) -> int:
        """That number of workers, or as many as there are devices for."""
        return self._devices.at_most(number)

    @property
    def envelope(self) -> str:
        """The envelope around the handler: the model's, or else the server's."""
        return self._host.config.service_envelope if self.config.envelope is None else self.config.envelope

    def new_slot(self, num_here: int = 0) -> Slot:
        """A slot on another machine if there are any; the first ones may stay here."""
        number = self._devices.take_id() or next(self._host.worker_ids)
        ref = WorkerRef(number, self._name, self._version)
        if self._cluster is None or num_here < self._settings.here:
            return Slot(ref, self._devices.place())
        return Slot(ref, placement=self._cluster.new_placement(self._name, self.config))

    def new_worker(
        self,
        slot: Slot,
        *,
        num_workers: int,
        on_free: Callable[[], None],
        on_lost: Callable[[WorkerExit, list[tuple[Job, int]], list[Job]], None],
        traffic: ModelTraffic,
        step_times: StepTimes,
        slow: SlowRequests,
    ) -> RemoteWorker:
        """A worker for that slot, which shares the cores with `num_workers`; raises MissingPackages."""
        self._check_packages()
        telemetry, events = self._host.telemetry, self._host.events

        def on_samples(message: Samples) -> None:
            telemetry.add_samples(message.samples, self._name)

        def on_printed(samples: list[Sample]) -> None:
            telemetry.add_samples(samples, self._name)

        spec = self._spec(slot, self._load(slot), num_workers)
        if slot.placement is None:
            spec = self._devices.apply(spec, slot.devices)
        else:
            spec = self._devices.split(replace(spec, environment=self._node_variables(spec.environment)))
        output = WorkerOutput(self._host.logs, spec.name, on_printed, events, self._name)
        return RemoteWorker(
            spec,
            on_free=on_free,
            on_lost=on_lost,
            on_samples=on_samples,
            traffic=traffic,
            slow=slow,
            output=output,
            events=events,
            launcher=self._host.launcher,
            placement=slot.placement,
            step_times=step_times,
        )

    def _node_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """As many threads as the worker has CPUs there."""
        threads = str(max(1, int(self._settings.cpus)))
        return {**environment, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def _check_packages(self) -> None:
        """Raise MissingPackages if the handler is built in and cannot be imported; a worker would only tell it later.

        An interpreter of the model's own is not examined.
        """
        environment, folder = self.environment, self._source.folder
        if self._cluster is not None:  # the packages of its machine count
            return
        if environment.python != sys.executable or (folder / f"{self._handler}.py").is_file():
            return
        path = [str(folder), *([str(environment.packages)] if environment.packages else []), *sys.path]
        if problem := missing_packages(self._handler, path):
            raise MissingPackages(problem)

    def _load(self, slot: Slot) -> Load:
        server, telemetry = self._host.config, self._host.telemetry
        return Load(
            model=self._name,
            version=self._version,
            folder=str(self._source.folder),
            handler=self._handler,
            batch_size=1 if self.config.schedule == "async" else self.config.batch_size,
            gpu_id=self._devices.gpu_id(slot.devices),
            decode_input=server.decode_input_request,
            limit_max_image_pixels=server.limit_max_image_pixels,
            max_response_bytes=server.max_response_bytes,
            probe=self._host.probe(),
            envelope=self.envelope,
            watch=server.watch and not self._source.is_temporary,
            schedule=self.config.schedule,
            explains_bodies=server.plain_errors,
            metrics_file=str(telemetry.file),
            metrics=[(one.name, one.kind, one.unit, [*one.dimensions]) for one in telemetry.model_definitions],
            json_logs=server.log_format == "json",
            traces=server.tracing.is_on,
        )

    def _spec(self, slot: Slot, load: Load, num_workers: int) -> WorkerSpec:
        server = self._host.config
        is_pipelined = bool(self.config.options.get("pipeline")) and slot.device is None
        threads = threads_per_worker(self._num_cores, num_workers, is_pipelined=is_pipelined)
        environment = environment_for(
            load, threads=threads, hidden=server.hidden_env, sequence_headers=server.sequence_headers
        )
        # In both directions: the server's own variables of these names may be overruled by its flags.
        environment["FLAMBEAU_WEIGHTS_ONLY"] = "true" if server.weights_only else "false"
        environment["FLAMBEAU_SAFE_WEIGHTS"] = "true" if server.safe_weights else "false"
        if server.safe_weights:
            # This one is torch's own: torch.load in a handler reads data only, too.
            environment["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
            environment.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        return WorkerSpec(
            id=slot.id,
            load=load,
            environment=self.environment.extend(environment),
            python=self.environment.python,
            max_frame_bytes=server.max_response_bytes * max(1, self.config.num_together),
            transport=server.worker_transport,
            restore_files=self._source.restore if self._source.origin else None,
            remote=self._source.remote,
        )
