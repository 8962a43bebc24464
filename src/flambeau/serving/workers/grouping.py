"""Grouping: the devices and the processes that each worker of a model gets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flambeau.config.model import ModelConfig
from flambeau.serving.workers.devices import visibility_variable
from flambeau.serving.workers.placement import next_device, next_devices, num_groups, visible_devices
from flambeau.serving.workers.ranks import MeetingPoints, Ranks
from flambeau.serving.workers.worker_process import WorkerSpec


class Grouping:
    """An ordinary worker is one process with one device, or none; one of a parallel model has several."""

    def __init__(
        self,
        model: str,
        config: ModelConfig,
        gpus: range,
        devices_in_use: Callable[[], Iterable[int | None]],
        meeting_points: MeetingPoints,
    ) -> None:
        self._ranks = Ranks.of(config)
        self._level = config.parallel_level if config.parallel_type else 0
        self._candidates = candidates_of(config, gpus)
        self._most = None  # as many workers as anybody likes
        if self._candidates and self._level:
            self._most = num_groups(len(self._candidates), self._level, model)
        self._devices_in_use = devices_in_use
        self._meeting_points = meeting_points
        self.config = replace(
            config, min_workers=self.at_most(config.min_workers), max_workers=self.at_most(config.max_workers)
        )

    def at_most(self, number: int) -> int:
        """That many workers, or as many as there are groups of devices."""
        return number if self._most is None else min(number, self._most)

    def take_id(self) -> int | None:
        """The number of a worker that takes several in a row; None: it needs only one."""
        return self._meeting_points.take_id(self._level) if self._level else None

    def place(self) -> tuple[int, ...]:
        """The devices of the next worker, in view of those in use."""
        if self._candidates and self._level:
            return next_devices(self._candidates, self._level, self._devices_in_use())
        device = next_device(self._candidates, self._devices_in_use())
        return () if device is None else (device,)

    def gpu_id(self, devices: Sequence[int]) -> int | None:
        """The number under which a handler knows its device; a group sees its own devices only."""
        if not devices:
            return None
        return 0 if self._level else devices[0]

    def apply(self, spec: WorkerSpec, devices: Sequence[int]) -> WorkerSpec:
        """The worker with the devices of its group, split into ranks where it is more than one process."""
        if self._level and devices:
            variable = visibility_variable()
            visible = visible_devices(devices, os.environ.get(variable))
            spec = replace(spec, environment={**spec.environment, variable: visible})
        if self._ranks is None:
            return spec
        return self._ranks.split(spec, self._meeting_points.take_port(spec.id))


def candidates_of(config: ModelConfig, gpus: range) -> Sequence[int]:
    """The GPUs a model's workers may be placed on; one id that does not exist makes the whole list void."""
    if config.device_type == "cpu" or not gpus:
        return ()
    valid = all(device in gpus for device in config.device_ids)
    return config.device_ids if config.device_ids and valid else gpus
