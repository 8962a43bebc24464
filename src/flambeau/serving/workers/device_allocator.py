"""DeviceAllocator: the devices that each worker of a model gets, and its split into ranks."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flambeau.config.model import ModelConfig
from flambeau.errors import PlacementFailed
from flambeau.serving.workers.host_resources import visibility_variable
from flambeau.serving.workers.ranks import RankLayout, RendezvousPorts
from flambeau.serving.workers.worker_process import WorkerSpec

logger = logging.getLogger(__name__)


class DeviceAllocator:
    """Places the workers of one model. A worker has one device or none; one of a parallel model has several."""

    def __init__(
        self,
        model: str,
        config: ModelConfig,
        gpus: range,
        devices_in_use: Callable[[], Iterable[int | None]],
        rendezvous_ports: RendezvousPorts,
        *,
        is_placed: bool = False,
    ) -> None:
        """`is_placed`: its workers run on other machines, apart from some."""
        self._ranks = RankLayout.of(config, may_span=is_placed)
        self._level = config.parallel_level if config.parallel_type else 0
        self._candidates = candidates_of(config, gpus)
        for text in () if is_placed else unmet_wishes(config, gpus):
            logger.warning("model %s: %s", model, text)
        self._max_workers: int | None = None  # None: no limit
        if self._candidates and self._level and not is_placed:
            self._max_workers = num_groups(len(self._candidates), self._level, model)
        self._devices_in_use = devices_in_use
        self._ports = rendezvous_ports
        self.config = replace(
            config, min_workers=self.at_most(config.min_workers), max_workers=self.at_most(config.max_workers)
        )

    def at_most(self, number: int) -> int:
        """That number of workers, or the number of device groups if it is smaller."""
        return number if self._max_workers is None else min(number, self._max_workers)

    def take_id(self) -> int | None:
        """The first of several ids in a row, one for each rank; None if the worker needs only one id."""
        return self._ports.take_id(self._ranks.count if self._ranks else self._level) if self._level else None

    def place(self) -> tuple[int, ...]:
        """The devices of the next worker."""
        if self._candidates and self._level:
            return next_devices(self._candidates, self._level, self._devices_in_use())
        device = next_device(self._candidates, self._devices_in_use())
        return () if device is None else (device,)

    def gpu_id(self, devices: Sequence[int]) -> int | None:
        """The number of a worker's device in its process; a group sees only its own devices."""
        if not devices:
            return None
        return 0 if self._level else devices[0]

    def apply(self, spec: WorkerSpec, devices: Sequence[int]) -> WorkerSpec:
        """Restrict a worker to the devices of its group and split it into ranks if it has several processes."""
        if self._level and devices:
            variable = visibility_variable()
            visible = visible_devices(devices, os.environ.get(variable))
            spec = replace(spec, environment={**spec.environment, variable: visible})
        if self._ranks is None:
            return spec
        return self._ranks.split(spec, self._ports.take_port(spec.id))

    def split(self, spec: WorkerSpec) -> WorkerSpec:
        """Split a worker of other machines into ranks; where they meet is known when they have their machines."""
        return spec if self._ranks is None else self._ranks.split(spec, 0)


def candidates_of(config: ModelConfig, gpus: range) -> Sequence[int]:
    """The GPUs for a model's workers; a list with an unknown id is ignored."""
    if config.device_type == "cpu" or not gpus:
        return ()
    valid = all(device in gpus for device in config.device_ids)
    return config.device_ids if config.device_ids and valid else gpus


def unmet_wishes(config: ModelConfig, gpus: range) -> list[str]:
    """What the settings say about devices and this machine does not fulfill, with the remedy."""
    ids = config.device_ids
    if not gpus:
        if config.device_type != "gpu" and not ids:
            return []
        wish = "deviceType is gpu" if config.device_type == "gpu" else f"deviceIds is {[*ids]}"
        how = f"as {config.parallel_level} processes on the CPU" if config.parallel_level > 1 else "on the CPU"
        return [
            f"{wish}, but the server found no GPU, so its workers run {how}. Check nvidia-smi, CUDA_VISIBLE_DEVICES "
            "and number_of_gpu, or set deviceType: cpu"
        ]
    if config.device_type == "cpu" or not ids:
        return []
    if unknown := [device for device in ids if device not in gpus]:
        return [f"deviceIds has {unknown}, but the GPUs are 0 to {gpus[-1]}; all of them are used instead"]
    if not config.parallel_type and config.max_workers < len(ids):
        return [
            f"deviceIds has {len(ids)} GPUs, but maxWorkers is {config.max_workers} and each worker has a copy of the "
            f"model on one GPU, so some stay idle. Set maxWorkers: {len(ids)}, or parallelType: tp for one model on all"
        ]
    return []


def next_device(candidates: Sequence[int], taken: Iterable[int | None]) -> int | None:
    """The candidate with the fewest workers, lowest number first; None without candidates."""
    load = Counter(taken)
    return min(candidates, key=lambda device: (load[device], candidates.index(device)), default=None)


def next_devices(candidates: Sequence[int], level: int, taken: Iterable[int | None]) -> tuple[int, ...]:
    """The least used `level` neighbors among the candidates; the last candidate's neighbor is the first.

    Among equals, a group that starts at a multiple of `level` comes first, so that groups leave no gaps.
    """
    load = Counter(taken)

    def neighbors(start: int) -> tuple[int, ...]:
        return tuple(candidates[(start + i) % len(candidates)] for i in range(level))

    def cost(start: int) -> tuple[int, int, bool, int]:
        used = [load[device] for device in neighbors(start)]
        return max(used), sum(used), start % level != 0, start

    return neighbors(min(range(len(candidates)), key=cost))


def num_groups(num_devices: int, level: int, model: str) -> int:
    """How many groups of `level` devices there are. Clients match the text of the error."""
    if level > num_devices:
        raise PlacementFailed(f"No enough gpu devices for model:{model} parallelLevel:{level}")
    return num_devices // level


def visible_devices(devices: Iterable[int], servers_own: str | None) -> str:
    """The value of a worker's visibility variable, so that it sees only these devices.

    `servers_own` is the server's value. If it is set, device numbers are positions in that list, and its names
    (numbers, UUIDs, MIG ids) are passed on.
    """
    if servers_own is None:
        return ",".join(map(str, devices))
    names = [name.strip() for name in servers_own.split(",") if name.strip() not in ("", "-1")]
    return ",".join(names[device] for device in devices)


def threads_per_worker(num_cores: int, num_workers: int, *, is_pipelined: bool = False) -> int:
    """An equal share of the cores; a worker that prepares batches in parallel leaves one of its cores free."""
    share = num_cores // max(1, num_workers)
    return max(1, share - is_pipelined)
