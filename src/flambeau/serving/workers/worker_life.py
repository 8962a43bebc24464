"""WorkerLife: what a RemoteWorker needs of its process, here or on another machine. NodePlacement: where that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flambeau.config.model import ModelConfig
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.workers.process_state import ProcessState
from flambeau.serving.workers.stacks import Stacks
from flambeau.serving.workers.worker_output import WorkerOutput
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import Failed


class WorkerLife(Protocol):
    """One process of a worker, from its start to its exit."""

    load_failure: Failed | None  # as the worker reported it

    @property
    def pid(self) -> int:
        """The process id on its machine, or 0 before there is one."""

    @property
    def local_pids(self) -> list[int]:
        """The process ids of this machine; empty if it runs on another."""

    @property
    def has_exited(self) -> bool: ...

    @property
    def resident_bytes(self) -> int:
        """Its resident memory, as last known; 0 if unknown."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, as last known."""

    async def look(self) -> ProcessState:
        """What the kernel knows of the process."""

    async def take_stacks(self, after_s: float = 0.0) -> Stacks:
        """Its stacks, a moment later."""

    async def run(self) -> WorkerExit:
        """Run the process to its end."""

    def kill(self, cause: WorkerExit) -> None:
        """Kill the process and its children; one that has not started yet is killed then."""

    def note_ready(self) -> None:
        """The worker has loaded its model."""

    def on_channel_closed(self) -> None:
        """The channel has ended: the process is exiting, or out of reach."""


NewLife = Callable[[WorkerSpec, Callable[[], ServerChannel], WorkerOutput], WorkerLife]


class Placer(Protocol):
    """Other machines for workers."""

    def new_placement(self, model: str, config: ModelConfig) -> NodePlacement:
        """A place for the workers of one slot of a model."""


class NodePlacement(Protocol):
    """Where the workers of one slot run in a cluster. It stays when a worker is replaced."""

    @property
    def node(self) -> str:
        """The names of its machines; empty while it waits for one."""

    @property
    def waiting(self) -> str:
        """What it waits for, in words; empty if it has its machines."""

    @property
    def node_ids(self) -> list[str]:
        """The cluster's ids of its machines."""

    @property
    def agent_pids(self) -> list[int]:
        """The process ids of its agents, each on its machine."""

    @property
    def num_neighbors(self) -> int:
        """Workers of this server on its least used machine, itself included."""

    def new_life(
        self, spec: WorkerSpec, new_channel: Callable[[], ServerChannel], output: WorkerOutput
    ) -> WorkerLife: ...

    @property
    def acquired_at(self) -> float:
        """When it got its machines, on the monotonic clock; 0 while it waits. Waiting is not loading."""

    def close(self) -> None:
        """Give its machines back."""
