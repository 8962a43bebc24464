"""RankLayout: how a worker is split into processes. RendezvousPorts: the ports where they connect."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flambeau.config.model import ModelConfig
from flambeau.errors import ConfigError
from flambeau.serving.workers.worker_process import WorkerSpec

logger = logging.getLogger(__name__)

LAST_PORT = 65535
MAX_NODES = 1024
_KNOWN = (
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-conf",
    "monitor-interval",
    "node-rank",
    "OMP_NUMBER_THREADS",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How one worker is split into processes. Each of them loads the model."""

    count: int
    keeps_step: bool  # every rank gets every batch; otherwise rank 0 gets them and leads the others
    threads: int

    @classmethod
    def of(cls, config: ModelConfig, *, may_span: bool = False) -> RankLayout | None:
        """The layout in a model's settings; None: one process. `may_span`: several machines."""
        if config.parallel_type in ("", "custom") or config.parallel_level < 1:
            return None
        _check(config.torchrun, may_span=may_span)
        threads = config.torchrun.get("OMP_NUMBER_THREADS", 1)
        return cls(
            count=config.parallel_level * num_nodes(config),
            keeps_step=keeps_step(config),
            threads=threads if isinstance(threads, int) and threads > 0 else 1,
        )

    def split(self, spec: WorkerSpec, port: int) -> WorkerSpec:
        """Rank 0 of a group that connects at this port, with the other ranks in `others`."""
        run_id = f"{spec.load.model}_{spec.id}"
        leader, *others = (
            replace(
                spec,
                id=spec.id + rank,
                load=msgspec.structs.replace(
                    spec.load,
                    rank=rank,
                    keeps_step=self.keeps_step,
                    gpu_id=None if spec.load.gpu_id is None else rank,  # a rank sees only the devices of its group
                ),
                environment={**spec.environment, **self.environment(rank, port=port, run_id=run_id)},
            )
            for rank in range(self.count)
        )
        return replace(leader, others=tuple(others), keeps_step=self.keeps_step)

    def environment(self, rank: int, *, port: int, run_id: str) -> dict[str, str]:
        """The variables that torchrun sets for one rank on a single machine."""
        count = str(self.count)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "ROLE_WORLD_SIZE": count,
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "LOGLEVEL": "INFO",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens the store
        }


def keeps_step(config: ModelConfig) -> bool:
    """Whether every rank gets every batch, and the next one only when all have finished it."""
    return config.parallel_type in ("tp", "pptp") and config.parallel_level > 0


def num_nodes(config: ModelConfig) -> int:
    """The machines of a worker: `nnodes` of torchrun."""
    nodes = config.torchrun.get("nnodes", 1)
    return nodes if isinstance(nodes, int) and not isinstance(nodes, bool) and nodes > 0 else 1


def _check(torchrun: Mapping[str, Any], *, may_span: bool) -> None:
    nodes = torchrun.get("nnodes", 1)
    if may_span and (not isinstance(nodes, int) or not 0 < nodes <= MAX_NODES) and str(nodes) != "1:1":
        raise ConfigError(f"torchrun: nnodes is {nodes!r}; it must be a whole number from 1 to {MAX_NODES}")
    if str(nodes) not in ("1", "1:1") and not may_span:
        raise ConfigError(
            f"torchrun: nnodes is {nodes}; the processes of a worker all run on this machine, so set nnodes: 1 and "
            "choose their number with nproc-per-node, or start the server with a cluster (--cluster ray)"
        )
    if unknown := [key for key in torchrun if key not in _KNOWN]:
        logger.warning("torchrun: %s is not known; known are %s", ", ".join(map(str, unknown)), ", ".join(_KNOWN))
    if torchrun.get("rdzv-endpoint"):
        logger.info("torchrun: rdzv-endpoint is ignored, because the processes of a worker run on this machine")


class RendezvousPorts:
    """Ids and ports for groups of processes. Each id is given out once, a port only while it is free."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._claims: set[int] = set()

    def take_id(self, count: int) -> int:
        """The first of `count` ids in a row; it is also the preferred port of the worker."""
        number, self._next = self._next, self._next + count
        return number

    def take_port(self, preferred: int) -> int:
        """The preferred port, or else the next free one."""
        for port in itertools.chain([preferred], self._fresh()):
            if port <= LAST_PORT and is_free(port) and self._claim(port):
                return port
        raise OSError("no port is free for the processes of a worker (initial_distribution_port)")

    def _claim(self, port: int) -> bool:
        """Reserve a port among the servers of this host: ranks listen only after they have loaded torch."""
        if port in self._claims or sys.platform != "linux":
            return True
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0flambeau-meeting-point-{port}")  # abstract name: freed when this process exits
            except OSError:
                return False
            weakref.finalize(self, os.close, claim.detach())
        self._claims.add(port)
        return True

    def _fresh(self) -> Iterator[int]:
        for _ in range(LAST_PORT):
            if self._next > LAST_PORT:
                self._next = self._first
            yield self.take_id(1)


def is_free(port: int) -> bool:
    """Whether a listener could open that port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
