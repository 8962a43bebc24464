"""The placer of a Ray cluster: the only process of a server that imports ray. It carries control, never requests.

python -m flambeau.cluster.ray_placer --fd N [--address HOST:PORT]

An agent is an actor that holds the resources of its worker. Ray gets only texts and numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flambeau.cluster.agent import Agent, AgentSettings
from flambeau.serving.cluster.node_choice import allowed, choose, demand_of
from flambeau.wire.cluster_messages import (
    AskNodes,
    Connected,
    ControlChannel,
    Lost,
    NodeInfo,
    Nodes,
    Place,
    Remove,
    ToPlacer,
    Waiting,
    to_placer_decoder,
)

WATCH_S = 0.1
SPARE_CALLS = 3  # one process runs them all, and those that Ray has started for the others stay idle
SUSPECT_S = 5.0  # Ray may not know for a while that a machine is gone
SPARES_S = 1.0  # between two looks whether idle processes were used
# A worker is a child of its agent's process and must outlive it; Ray kills the children of its processes otherwise.
AGENT_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "0"}


class AgentActor:
    """An agent in a process of Ray."""

    def run(self, settings: bytes) -> str:
        """Serve until the server closes the connection; how it ended."""
        import ray

        given = msgspec.json.decode(settings, type=AgentSettings)
        context = ray.get_runtime_context()
        own = msgspec.structs.replace(
            given, node=context.get_node_id(), node_address=ray.util.get_node_ip_address(), host=socket.gethostname()
        )
        asyncio.run(Agent(own).run())
        return "the server closed the connection"


@dataclass(slots=True)
class Held:
    """The agents of one Place."""

    demand: dict[str, float]
    actors: list[Any] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)  # references to their endless calls
    nodes: list[str] = field(default_factory=list)  # empty: Ray chooses
    group: Any = None  # the placement group of several


class RayPlacer:
    """Turns Place into actors, and reports those that have ended. Calls of Ray run in one thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._held: dict[str, Held] = {}
        self._nodes_with_spare: set[str] = set()
        self._suspects: dict[str, float] = {}  # machines where an agent has just ended, until when

    async def run(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[str] = loop.create_future()
        queue: asyncio.Queue[ToPlacer] = asyncio.Queue()
        channel: ControlChannel[ToPlacer] = ControlChannel(to_placer_decoder, queue.put_nowait, closed.set_result)
        self._channel = channel
        await loop.connect_accepted_socket(lambda: channel, socket.socket(fileno=fd))
        channel.send(Connected(await loop.run_in_executor(self._thread, self._connect)))
        tasks: list[asyncio.Future[Any]] = [
            loop.create_task(self._serve(queue)),
            loop.create_task(self._watch()),
            closed,
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # an error ends the process, and the server starts another

    async def _serve(self, queue: asyncio.Queue[ToPlacer]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await queue.get()
            for answer in await loop.run_in_executor(self._thread, self._handle, message):
                self._channel.send(answer)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        rounds = 0
        while True:
            await asyncio.sleep(WATCH_S)
            rounds += 1
            if rounds % round(SPARES_S / WATCH_S) == 0:
                await loop.run_in_executor(self._thread, self._prepare_spares)
            for lost in await loop.run_in_executor(self._thread, self._find_lost):
                self._channel.send(lost)

    # ---- in the thread ----

    def _connect(self) -> str:
        import ray

        ray.init(
            address=self._address or "auto",
            namespace="flambeau",
            log_to_driver=False,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": AGENT_VARIABLES},
        )
        nodes = [node for node in self._nodes() if node.is_alive]
        self._prepare_spares()
        return f"Ray {ray.__version__} at {ray.get_runtime_context().gcs_address}, {len(nodes)} nodes"

    def _handle(self, message: ToPlacer) -> list[Any]:
        if isinstance(message, Place):
            return self._place(message)
        if isinstance(message, Remove):
            self._remove(message.id)
            return []
        assert isinstance(message, AskNodes)
        return [Nodes(message.serial, self._nodes())]

    def _nodes(self) -> list[NodeInfo]:
        import ray

        return [
            NodeInfo(
                id=node["NodeID"],
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                is_alive=node["Alive"],
                resources={name: float(amount) for name, amount in node["Resources"].items()},
            )
            for node in ray.nodes()
        ]

    def _place(self, place: Place) -> list[Any]:
        """Ask for actors. Without room now they stay pending, which is the demand that an autoscaler sees."""
        nodes, now = self._nodes(), time.monotonic()
        lost = [node for node, until in self._suspects.items() if until > now]
        place = msgspec.structs.replace(place, avoid=[*place.avoid, *lost])
        if place.node and not allowed(nodes, place):
            return [Lost(place.id, f"{place.host} is not in the cluster")]
        chosen = choose(nodes, place, self._used(), [node for held in self._held.values() for node in held.nodes])
        held = self._held[place.id] = Held(demand_of(place), nodes=[node.id for node in chosen])
        if len(place.agents) > 1:
            held.group = new_group(place)
        for number in range(len(place.agents)):
            actor = new_actor(place, strategy_of(place, chosen, held.group, number))
            held.actors.append(actor)
            held.runs.append(actor.run.remote(settings_of(place, number)))
        self._nodes_with_spare.difference_update(node.id for node in chosen)
        return [] if chosen else [Waiting(place.id, "")]

    def _prepare_spares(self) -> None:
        """Keep idle processes of Ray on each machine, in which the next agents start at once instead of in seconds.

        Ray starts an actor only in a process that has run nothing. Calls in a row make it start more than they need.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = {node.id for node in self._nodes() if node.is_alive and node.resources.get("CPU")}
        for node in alive - self._nodes_with_spare:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            for _ in range(SPARE_CALLS):
                ray.remote(be_spare).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0).remote()
        self._nodes_with_spare = alive

    def _used(self) -> dict[str, dict[str, float]]:
        used: dict[str, dict[str, float]] = {}
        for held in self._held.values():
            for node in held.nodes:
                sums = used.setdefault(node, {})
                for name, amount in held.demand.items():
                    sums[name] = sums.get(name, 0.0) + amount
        return used

    def _remove(self, place_id: str) -> None:
        import ray

        held = self._held.pop(place_id, None)
        if held is None:
            return
        for actor in held.actors:
            ray.kill(actor)
        if held.group is not None:
            ray.util.remove_placement_group(held.group)

    def _find_lost(self) -> list[Lost]:
        import ray

        runs = {run: place_id for place_id, held in self._held.items() for run in held.runs}
        if not runs:
            return []
        done, _ = ray.wait([*runs], num_returns=len(runs), timeout=0)
        found = []
        for run in done:
            place_id = runs[run]
            if place_id in self._held:
                reason = why_ended(run)
                until = time.monotonic() + SUSPECT_S
                self._suspects.update(dict.fromkeys(self._held[place_id].nodes, until))
                self._remove(place_id)
                found.append(Lost(place_id, reason))
        return found


def be_spare() -> None:
    """Nothing."""


def why_ended(run: Any) -> str:
    """How the endless call of an agent ended, in one line."""
    import ray

    try:
        return str(ray.get(run))
    except Exception as error:  # an actor or a node that died, or the agent's own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:300] if lines else type(error).__name__


def settings_of(place: Place, number: int) -> bytes:
    return msgspec.json.encode(
        AgentSettings(
            agent=place.agents[number],
            address=place.address,
            fingerprint=place.fingerprint,
            token=place.tokens[number],
            heartbeat_s=place.heartbeat_s,
            node="",
        )
    )


def new_actor(place: Place, strategy: dict[str, Any]) -> Any:
    import ray

    return (
        ray.remote(AgentActor)
        .options(
            num_cpus=place.cpus,
            num_gpus=place.gpus,
            resources=place.resources or None,
            max_restarts=0,
            **strategy,
        )
        .remote()
    )


def new_group(place: Place) -> Any:
    """Each bundle on a machine of its own, all or none."""
    from ray.util.placement_group import placement_group

    return placement_group([demand_of(place) for _ in place.agents], strategy="STRICT_SPREAD")


def strategy_of(place: Place, chosen: list[NodeInfo], group: Any, number: int) -> dict[str, Any]:
    """Where Ray puts an actor: in its bundle, on the chosen machine, or wherever there will be room."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    if group is not None:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return {"scheduling_strategy": strategy}
    if chosen:  # another server may have taken the room: then Ray looks elsewhere, unless it must be this machine
        is_soft = not place.node
        strategy = NodeAffinitySchedulingStrategy(chosen[0].id, soft=is_soft, _spill_on_unavailable=is_soft)
        return {"scheduling_strategy": strategy}
    if place.avoid:
        return {"label_selector": {"ray.io/node-id": f"!in({','.join(place.avoid)})"}}
    return {}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--address", default="")
    arguments = parser.parse_args()
    try:
        import ray  # noqa: F401
    except ImportError:
        print("ray is not installed: pip install 'flambeau[ray]'", file=sys.stderr)
        return 1
    try:
        asyncio.run(RayPlacer(arguments.address).run(arguments.fd))
    except (OSError, RuntimeError, ValueError) as error:  # as Ray reports that the head cannot be reached
        print(str(error).replace("\n", " "), file=sys.stderr)
        sys.stderr.flush()
    os._exit(1)  # Ray's own threads may hang while its head is gone


if __name__ == "__main__":
    sys.exit(main())
