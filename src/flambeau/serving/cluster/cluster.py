"""Cluster: the other machines of a server: its worker port, its placer and the placements of its slots."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence

from flambeau.config.model import ModelConfig
from flambeau.config.placement import PlacementSettings
from flambeau.config.server import ClusterConfig, read_secret
from flambeau.serving.cluster.joined_nodes import JoinedNodes
from flambeau.serving.cluster.placement import PlacementRequest, SlotPlacement
from flambeau.serving.cluster.placer_process import PlacerProcess
from flambeau.serving.cluster.resources import Demand
from flambeau.serving.cluster.worker_port import WorkerPort
from flambeau.serving.workers.launcher import Launcher
from flambeau.serving.workers.ranks import num_nodes
from flambeau.wire.cluster_messages import (
    AskNodes,
    Connected,
    FromPlacer,
    Lost,
    NodeInfo,
    Nodes,
    Place,
    Remove,
    Waiting,
)

logger = logging.getLogger(__name__)

SUSPECT_S = 30.0  # how long nothing is placed on a machine that was lost; by then the cluster knows it
ANSWER_S = 10.0
DEFAULT_PORT = 7075
MODULES = {"ray": "flambeau.cluster.ray_placer", "local": "flambeau.cluster.local_placer"}


class Cluster:
    """Places workers on other machines. Open it before the first, close it after the last."""

    def __init__(self, config: ClusterConfig, launcher: Launcher, command: Sequence[str] = ()) -> None:
        self.config = config
        self.port = WorkerPort(config.worker_address or default_address(config), config.heartbeat_s)
        self.connection = ""  # what the placer is connected with, in words; empty: nothing yet
        self.problem = ""  # the last words of a placer that ended
        self.placements: list[SlotPlacement] = []
        self._places: dict[str, SlotPlacement] = {}
        self._suspects: dict[str, float] = {}  # node → until when
        self._serials = itertools.count(1)
        self._answers: dict[int, asyncio.Future[list[NodeInfo]]] = {}
        address = ("--address", config.address) if config.address else ()
        if config.kind == "join":
            self.placer: PlacerProcess | JoinedNodes = JoinedNodes(self.port, read_secret(os.environ), self._on_message)
            return
        self.placer = PlacerProcess(
            command or (sys.executable, "-P", "-m", MODULES[config.kind], *address),
            launcher,
            on_start=self._on_placer_start,
            on_message=self._on_message,
            on_end=self._on_placer_end,
        )

    async def open(self) -> None:
        await self.port.open()
        self.placer.start()
        logger.info("workers of other machines connect to %s", self.port.address)

    async def close(self) -> None:
        for placement in [*self.placements]:
            placement.close()
        await self.placer.stop()
        await self.port.close()

    def new_placement(self, model: str, config: ModelConfig) -> SlotPlacement:
        placement = SlotPlacement(self, request_of(model, config))
        self.placements.append(placement)
        return placement

    def forget(self, placement: SlotPlacement) -> None:
        self.placements.remove(placement)

    def num_on(self, node: str) -> int:
        """The workers of this server on a machine."""
        return sum(seat.node == node for placement in self.placements for seat in placement.seats if seat.is_open)

    async def nodes(self) -> list[NodeInfo]:
        """The machines of the cluster; raises TimeoutError if the placer does not answer, or is not connected."""
        if not self.connection:
            raise TimeoutError(self.problem)
        serial = next(self._serials)
        answer: asyncio.Future[list[NodeInfo]] = asyncio.get_running_loop().create_future()
        self._answers[serial] = answer
        try:
            self.placer.send(AskNodes(serial))
            async with asyncio.timeout(ANSWER_S):
                return await answer
        finally:
            del self._answers[serial]

    # ---- for placements ----

    def place(self, message: Place, placement: SlotPlacement) -> None:
        self._places[message.id] = placement
        self.placer.send(message)

    def remove(self, message: Remove) -> None:
        self._places.pop(message.id, None)
        self.placer.send(message)

    def suspect(self, node: str) -> None:
        """Place nothing on this machine for a while: it was lost, and the cluster may not know it yet."""
        if node:
            self._suspects[node] = time.monotonic() + SUSPECT_S

    def suspects(self) -> list[str]:
        now = time.monotonic()
        self._suspects = {node: until for node, until in self._suspects.items() if until > now}
        return [*self._suspects]

    # ---- the placer ----

    def _on_placer_start(self) -> None:
        for placement in [*self.placements]:
            placement.ask_again()

    def _on_placer_end(self, words: str) -> None:
        self.connection, self.problem = "", words
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(TimeoutError(words))
        for placement in self.placements:
            placement.on_waiting(f"the placer ended: {words}")

    def _on_message(self, message: FromPlacer) -> None:
        if isinstance(message, Connected):
            self.connection = message.words
            logger.info("cluster: %s", message.words)
        elif isinstance(message, Nodes):
            answer = self._answers.get(message.serial)
            if answer is not None and not answer.done():
                answer.set_result(message.nodes)
        elif (placement := self._places.get(message.id)) is not None:
            if isinstance(message, Waiting):
                placement.on_waiting(message.reason)
            elif isinstance(message, Lost):
                placement.on_place_lost(message.id, message.reason)


def request_of(model: str, config: ModelConfig) -> PlacementRequest:
    """What a slot of a model asks of the cluster. The processes of a group share the GPUs of their machine."""
    settings = config.cluster or PlacementSettings()
    gpus = settings.gpus if settings.gpus is not None else float(config.device_type == "gpu")
    ranks = config.parallel_level if config.parallel_type not in ("", "custom") and config.parallel_level else 1
    return PlacementRequest(
        model=model,
        demand=Demand(cpus=settings.cpus * ranks, gpus=gpus * ranks, resources=settings.resources),
        num_nodes=num_nodes(config) if ranks > 1 or config.parallel_type else 1,
        ranks_per_node=ranks,
        pack=settings.spread == "pack",
        timeout_s=settings.timeout_s,
    )


def default_address(config: ClusterConfig, variable: str = "RAY_ADDRESS") -> str:
    """The address of this machine that reaches the cluster's head, with the usual port."""
    head = config.address if config.kind == "ray" else ""
    head = head or (os.environ.get(variable, "") if config.kind == "ray" else "")
    host, _, port = head.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host or "127.0.0.1", int(port or 1)))
            return f"{probe.getsockname()[0]}:{DEFAULT_PORT}"
        except (OSError, ValueError):
            return f"127.0.0.1:{DEFAULT_PORT}"
