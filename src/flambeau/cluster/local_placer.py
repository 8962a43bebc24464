"""A placer without a cluster: its machines are this one, several times. For trials and tests.

python -m flambeau.cluster.local_placer --fd N --address 2     (two machines of four CPUs)
python -m flambeau.cluster.local_placer --fd N --address 2x8x1 (two machines of eight CPUs and one GPU)
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections import Counter

import msgspec

from flambeau.cluster.agent import AgentSettings
from flambeau.serving.cluster.node_choice import choose, demand_of
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

PR_SET_PDEATHSIG = 1
RETRY_S = 0.1
_libc = ctypes.CDLL(None)


def nodes_of(text: str) -> list[NodeInfo]:
    """The machines of "NUMBER[xCPUS[xGPUS]]"."""
    number, cpus, gpus, *_ = [*map(int, text.split("x")), *(4, 0)[text.count("x") :]]
    address, host = "127.0.0.1", socket.gethostname()
    return [
        NodeInfo(f"local-{i}", f"{host}-{i}", address, True, {"CPU": float(cpus), "GPU": float(gpus)})
        for i in range(number)
    ]


class LocalPlacer:
    """Starts agents as processes of this machine. They die with it, as those of a cluster do."""

    def __init__(self, nodes: list[NodeInfo]) -> None:
        self._nodes = nodes
        self._agents: dict[str, list[tuple[NodeInfo, subprocess.Popen[bytes]]]] = {}  # by Place
        self._gpus: dict[str, list[str]] = {}  # by Place: those of each agent
        self._waiting: dict[str, Place] = {}
        self._demands: dict[str, dict[str, float]] = {}

    async def run(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[str] = loop.create_future()
        self._channel: ControlChannel[ToPlacer] = ControlChannel(to_placer_decoder, self._on_message, closed.set_result)
        await loop.connect_accepted_socket(lambda: self._channel, socket.socket(fileno=fd))
        self._channel.send(Connected(f"{len(self._nodes)} local nodes"))
        watch = loop.create_task(self._watch())
        await closed
        watch.cancel()
        self.remove_all()

    def remove_all(self) -> None:
        for place_id in [*self._agents]:
            self._remove(place_id)

    def _on_message(self, message: ToPlacer) -> None:
        if isinstance(message, Place):
            self._waiting[message.id] = message
            self._try(message)
        elif isinstance(message, Remove):
            self._remove(message.id)
        elif isinstance(message, AskNodes):
            self._channel.send(Nodes(message.serial, self._nodes))

    def _try(self, place: Place) -> None:
        used: dict[str, Counter[str]] = {}
        for place_id, agents in self._agents.items():
            for node, _ in agents:
                used.setdefault(node.id, Counter()).update(self._demands[place_id])
        occupants = [node.id for agents in self._agents.values() for node, _ in agents]
        chosen = choose(self._nodes, place, used, occupants)
        if not chosen:
            self._channel.send(Waiting(place.id, ""))
            return
        del self._waiting[place.id]
        self._demands[place.id] = demand_of(place)
        self._gpus[place.id] = [self._take_gpus(place, node) for node in chosen]
        self._agents[place.id] = [
            (node, start_agent(place, number, node, self._gpus[place.id][number])) for number, node in enumerate(chosen)
        ]

    def _take_gpus(self, place: Place, node: NodeInfo) -> str:
        """The numbers of the GPUs with the fewest agents; agents with a fraction share one."""
        load: Counter[str] = Counter({str(number): 0 for number in range(int(node.resources.get("GPU", 0)))})
        for place_id, agents in self._agents.items():
            for (other, _), gpus in zip(agents, self._gpus[place_id], strict=True):
                load.update(gpus.split(",") if other.id == node.id and gpus else ())
        free = sorted(load, key=lambda gpu: (load[gpu], int(gpu)))
        return ",".join(free[: max(1, int(place.gpus))]) if place.gpus else ""

    def _remove(self, place_id: str) -> None:
        self._waiting.pop(place_id, None)
        self._demands.pop(place_id, None)
        self._gpus.pop(place_id, None)
        for _, popen in self._agents.pop(place_id, []):
            popen.kill()
            popen.wait()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            for place_id, agents in [*self._agents.items()]:
                if any(popen.poll() is not None for _, popen in agents):
                    self._remove(place_id)
                    self._channel.send(Lost(place_id, "the agent has ended"))
            for place in [*self._waiting.values()]:
                self._try(place)


def start_agent(place: Place, number: int, node: NodeInfo, gpus: str) -> subprocess.Popen[bytes]:
    settings = AgentSettings(
        agent=place.agents[number],
        address=place.address,
        fingerprint=place.fingerprint,
        token=place.tokens[number],
        node=node.id,
        host=node.host,
        node_address=node.address,
        heartbeat_s=place.heartbeat_s,
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    popen = subprocess.Popen(
        (sys.executable, "-P", "-m", "flambeau.cluster.agent"),
        stdin=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    assert popen.stdin is not None
    popen.stdin.write(msgspec.json.encode(settings))
    popen.stdin.close()
    return popen


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--address", default="2")
    arguments = parser.parse_args()
    asyncio.run(LocalPlacer(nodes_of(arguments.address)).run(arguments.fd))
    return 0


if __name__ == "__main__":
    sys.exit(main())
