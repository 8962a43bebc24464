"""The ranks of a worker that is a group of processes: how many, what each is told, and where they meet; mostly pure."""

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
class Ranks:
    """How one worker is split into processes; every one of them loads the model."""

    count: int
    keeps_step: bool  # every rank gets every batch; otherwise rank 0 gets them and calls upon the others itself
    threads: int

    @classmethod
    def of(cls, config: ModelConfig) -> Ranks | None:
        """What a model's settings ask for; None: an ordinary worker."""
        if config.parallel_type in ("", "custom") or config.parallel_level < 1:
            return None
        _check(config.torchrun)
        threads = config.torchrun.get("OMP_NUMBER_THREADS", 1)
        return cls(
            count=config.parallel_level,
            keeps_step=keeps_step(config),
            threads=threads if isinstance(threads, int) and threads > 0 else 1,
        )

    def split(self, spec: WorkerSpec, port: int) -> WorkerSpec:
        """The same worker as a group, whose processes meet at that port: rank 0, followed by the others."""
        run_id = f"{spec.load.model}_{spec.id}"
        leader, *others = (
            replace(
                spec,
                id=spec.id + rank,
                load=msgspec.structs.replace(
                    spec.load,
                    rank=rank,
                    keeps_step=self.keeps_step,
                    gpu_id=None if spec.load.gpu_id is None else rank,  # it sees the devices of its group only
                ),
                environment={**spec.environment, **self.environment(rank, port=port, run_id=run_id)},
            )
            for rank in range(self.count)
        )
        return replace(leader, others=tuple(others), keeps_step=self.keeps_step)

    def environment(self, rank: int, *, port: int, run_id: str) -> dict[str, str]:
        """The variables of one rank: what torchrun would set on a single machine."""
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
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens the store where the ranks meet
        }


def keeps_step(config: ModelConfig) -> bool:
    """Whether every rank of a worker gets every batch, and the next one when all are done with it."""
    return config.parallel_type in ("tp", "pptp") and config.parallel_level > 0


def _check(torchrun: Mapping[str, Any]) -> None:
    nodes = torchrun.get("nnodes", 1)
    if str(nodes) not in ("1", "1:1"):
        raise ConfigError(
            f"torchrun: nnodes is {nodes}; the processes of a worker all run on this machine, so set nnodes: 1 and "
            "choose their number with nproc-per-node"
        )
    if unknown := [key for key in torchrun if key not in _KNOWN]:
        logger.warning("torchrun: %s is not known; known are %s", ", ".join(map(str, unknown)), ", ".join(_KNOWN))
    if torchrun.get("rdzv-endpoint"):
        logger.info("torchrun: rdzv-endpoint is not needed, since the processes of a worker meet on this machine")


class MeetingPoints:
    """Numbers for groups of processes: each number is given out once, and a port only while it is free."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._claims: set[int] = set()

    def take_id(self, count: int) -> int:
        """The first of `count` numbers in a row: the id of a worker, and where its first processes may meet."""
        number, self._next = self._next, self._next + count
        return number

    def take_port(self, preferred: int) -> int:
        """A port that nobody listens on: the preferred one, or else the next one that is."""
        for port in itertools.chain([preferred], self._fresh()):
            if port <= LAST_PORT and is_free(port) and self._claim(port):
                return port
        raise OSError("no port is free for the processes of a worker to meet at (initial_distribution_port)")

    def _claim(self, port: int) -> bool:
        """Whether no other server here has chosen it: its ranks listen there only once they have loaded torch."""
        if port in self._claims or sys.platform != "linux":
            return True
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0flambeau-meeting-point-{port}")  # no file: the name is free again when we are gone
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
    """Whether a listener could have that port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
