"""JoinedNodes: machines that have dialed the server by themselves, such as pods of a LeaderWorkerSet. No manager."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from flambeau.serving.cluster.node_choice import choose, demand_of
from flambeau.serving.cluster.worker_port import WorkerPort
from flambeau.wire.cluster_messages import (
    AskNodes,
    Connected,
    ControlChannel,
    FromPlacer,
    Lost,
    NodeInfo,
    Nodes,
    Place,
    Remove,
    ToPlacer,
    Waiting,
    Welcome,
    from_placer_decoder,
)
from flambeau.wire.tls import proof_of

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class JoinedNode:
    """One machine: its channel, and what it has told of itself."""

    channel: ControlChannel[FromPlacer] | None = None
    info: NodeInfo | None = None


@dataclass(slots=True)
class JoinedPlace:
    """Where the agents of a Place are."""

    demand: dict[str, float]
    nodes: list[str] = field(default_factory=list)


class JoinedNodes:
    """Takes the place of the placer process: it chooses a machine, and lets it start the agents."""

    pid = 0
    num_restarts = 0

    def __init__(self, port: WorkerPort, secret: str, on_message: Callable[[FromPlacer], None]) -> None:
        self._port = port
        self._secret = secret
        self._on_message = on_message
        self._nodes: dict[str, JoinedNode] = {}
        self._places: dict[str, JoinedPlace] = {}
        self._waiting: dict[str, Place] = {}

    def start(self) -> None:
        """Call it when the port is open."""
        self._port.expect_always(proof_of(self._secret, "join", self._port.fingerprint), self._new_channel)
        self._on_message(Connected("machines join by themselves"))

    async def stop(self) -> None:
        for node in [*self._nodes.values()]:
            if node.channel is not None:
                node.channel.close()

    def send(self, message: ToPlacer) -> None:
        if isinstance(message, Place):
            self._waiting[message.id] = message
            self._try(message)
        elif isinstance(message, Remove):
            self._remove(message)
        elif isinstance(message, AskNodes):
            answer = Nodes(message.serial, self._infos())
            asyncio.get_running_loop().call_soon(self._on_message, answer)

    def _infos(self) -> list[NodeInfo]:
        return [node.info for node in self._nodes.values() if node.info is not None]

    def _try(self, place: Place) -> None:
        used: dict[str, dict[str, float]] = {}
        for held in self._places.values():
            for name in held.nodes:
                sums = used.setdefault(name, {})
                for resource, amount in held.demand.items():
                    sums[resource] = sums.get(resource, 0.0) + amount
        occupants = [name for held in self._places.values() for name in held.nodes]
        chosen = choose(self._infos(), place, used, occupants)
        if not chosen:
            self._on_message(Waiting(place.id, f"{len(self._nodes)} machines have joined"))
            return
        del self._waiting[place.id]
        self._places[place.id] = JoinedPlace(demand_of(place), [node.id for node in chosen])
        for number, node in enumerate(chosen):
            share = msgspec.structs.replace(
                place, agents=[place.agents[number]], tokens=[place.tokens[number]], node=node.id, host=node.host
            )
            self._send(node.id, share)

    def _send(self, name: str, message: ToPlacer) -> None:
        node = self._nodes.get(name)
        if node is not None and node.channel is not None:
            node.channel.send(message)

    def _remove(self, message: Remove) -> None:
        self._waiting.pop(message.id, None)
        held = self._places.pop(message.id, None)
        for name in held.nodes if held is not None else ():
            self._send(name, message)
        self._try_waiting()

    def _try_waiting(self) -> None:
        for place in [*self._waiting.values()]:
            self._try(place)

    # ---- machines ----

    def _new_channel(self) -> ControlChannel[FromPlacer]:
        node = JoinedNode()

        def on_message(message: FromPlacer) -> None:
            self._on_node_message(node, message)

        def on_closed(reason: str) -> None:
            self._on_left(node)

        node.channel = ControlChannel(from_placer_decoder, on_message, on_closed)
        proof = proof_of(self._secret, "welcome", self._port.fingerprint)
        asyncio.get_running_loop().call_soon(node.channel.send, Welcome(proof))
        return node.channel

    def _on_node_message(self, node: JoinedNode, message: FromPlacer) -> None:
        if isinstance(message, Nodes):
            [node.info] = message.nodes
            self._nodes[node.info.id] = node
            logger.info("%s has joined, with %s", node.info.host, node.info.resources)
            self._try_waiting()
        elif isinstance(message, Lost):
            held = self._places.pop(message.id, None)
            if held is not None:
                self._on_message(message)

    def _on_left(self, node: JoinedNode) -> None:
        if node.info is None or self._nodes.get(node.info.id) is not node:
            return
        logger.warning("%s has left", node.info.host)
        del self._nodes[node.info.id]
        for place_id, held in [*self._places.items()]:
            if node.info.id in held.nodes:
                del self._places[place_id]
                self._on_message(Lost(place_id, f"{node.info.host} has left"))
