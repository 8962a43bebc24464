"""WorkerMaker: a worker of a model, with all that it is told: its files, device, environment and share of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.logs.writer import Logs
from flambeau.metrics.traffic import ModelTraffic
from flambeau.serving.job import Job
from flambeau.serving.sources.dependencies import THE_SERVERS_OWN
from flambeau.serving.sources.source import Source
from flambeau.serving.telemetry import Telemetry
from flambeau.serving.workers.devices import count_cores
from flambeau.serving.workers.grouping import Grouping
from flambeau.serving.workers.output import WorkerOutput
from flambeau.serving.workers.placement import threads_per_worker
from flambeau.serving.workers.ranks import MeetingPoints
from flambeau.serving.workers.recovery import Death
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.supervisor import Slot
from flambeau.serving.workers.worker_process import WorkerSpec, environment_for, worker_name
from flambeau.wire.messages import Load, Samples, Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What models of one server share: its settings, devices, worker numbers, metrics and logs."""

    config: ServerConfig
    gpus: range
    worker_ids: Iterator[int]
    meeting_points: MeetingPoints
    make_room: Callable[[], bool]
    telemetry: Telemetry
    logs: Logs
    probe: Callable[[], Shared | None]
    devices_in_use: Callable[[], Iterator[int | None]]


class WorkerMaker:
    """Makes the workers of one model, and the slots they live in."""

    def __init__(self, name: str, version: str, handler: str, source: Source, config: ModelConfig, host: Host) -> None:
        self._name = name
        self._version = version
        self._handler = handler
        self._source = source
        self._host = host
        self._num_cores = count_cores()
        self._grouping = Grouping(name, config, host.gpus, host.devices_in_use, host.meeting_points)
        self.config = self._grouping.config
        self.environment = THE_SERVERS_OWN  # what they run on

    def at_most(self, number: int) -> int:
        """That many workers, or as many as there are devices for."""
        return self._grouping.at_most(number)

    @property
    def envelope(self) -> str:
        """What is around the handler: what the model names, else what the server does."""
        return self._host.config.service_envelope if self.config.envelope is None else self.config.envelope

    def new_slot(self) -> Slot:
        """A place for one worker, with a number and devices of its own."""
        number = self._grouping.take_id() or next(self._host.worker_ids)
        return Slot(number, self._grouping.place(), worker_name(number, self._name, self._version))

    def new_worker(
        self,
        slot: Slot,
        *,
        num_workers: int,
        on_free: Callable[[], None],
        on_lost: Callable[[Death, list[tuple[Job, int]], list[Job]], None],
        traffic: ModelTraffic,
    ) -> RemoteWorker:
        """A worker for that place; it shares the cores with `num_workers`."""
        measures = self._host.telemetry

        def on_samples(message: Samples) -> None:
            measures.add_samples(message.samples)

        spec = self._grouping.apply(self._spec(slot, self._load(slot), num_workers), slot.devices)
        output = WorkerOutput(self._host.logs, spec.name, measures.add_samples)
        return RemoteWorker(
            spec, on_free=on_free, on_lost=on_lost, on_samples=on_samples, traffic=traffic, output=output
        )

    def _load(self, slot: Slot) -> Load:
        server, measures = self._host.config, self._host.telemetry
        return Load(
            model=self._name,
            version=self._version,
            folder=str(self._source.folder),
            handler=self._handler,
            batch_size=1 if self.config.schedule == "async" else self.config.batch_size,
            gpu_id=self._grouping.gpu_id(slot.devices),
            decode_input=server.decode_input_request,
            limit_max_image_pixels=server.limit_max_image_pixels,
            max_response_bytes=server.max_response_bytes,
            probe=self._host.probe(),
            envelope=self.envelope,
            watch=server.watch and not self._source.is_temporary,
            schedule=self.config.schedule,
            metrics_file=str(measures.file),
            metrics=[(one.name, one.kind, one.unit, [*one.dimensions]) for one in measures.model_definitions],
        )

    def _spec(self, slot: Slot, load: Load, num_workers: int) -> WorkerSpec:
        server = self._host.config
        is_pipelined = bool(self.config.options.get("pipeline")) and slot.device is None
        threads = threads_per_worker(self._num_cores, num_workers, is_pipelined=is_pipelined)
        environment = environment_for(
            load, threads=threads, hidden=server.hidden_env, sequence_headers=server.sequence_headers
        )
        if not server.weights_only:
            environment["FLAMBEAU_WEIGHTS_ONLY"] = "false"
        return WorkerSpec(
            id=slot.id,
            load=load,
            environment=self.environment.extend(environment),
            python=self.environment.python,
            max_frame_bytes=server.max_response_bytes * max(1, self.config.num_together),
            transport=server.worker_transport,
        )
