"""SlotPlacement: the machines of one slot, for all workers that run in it. Seat: one of them, with its agent."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from flambeau import __version__
from flambeau.errors import PlacementFailed
from flambeau.serving.cluster.agent_link import AgentLink
from flambeau.serving.cluster.placed_worker import PlacedWorker
from flambeau.serving.cluster.resources import Demand, waiting_in_words
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.workers.worker_output import WorkerOutput
from flambeau.serving.workers.worker_process import WorkerSpec
from flambeau.wire.channel import ServerChannel
from flambeau.wire.cluster_messages import Place, Remove, ToAgent

if TYPE_CHECKING:
    from flambeau.serving.cluster.cluster import Cluster
    from flambeau.serving.cluster.worker_port import WorkerPort

logger = logging.getLogger(__name__)

ORPHAN_S = 0.3  # after the end of an agent: a worker that is still connected has only lost its agent
RETRIES_S = (0.1, 1.0, 5.0)  # until an agent is asked for again, where the cluster could not start one
_ids = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a slot asks for."""

    model: str
    demand: Demand  # of each machine
    num_nodes: int = 1
    ranks_per_node: int = 1
    pack: bool = False
    timeout_s: float = 600.0


@dataclass(slots=True, eq=False)
class Seat:
    """A place on one machine, held by an agent."""

    number: int
    link: AgentLink | None = None
    node: str = ""
    host: str = ""
    address: str = ""
    devices: str = ""
    place_id: str = ""
    lives: set[PlacedWorker] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.link is not None and self.link.is_open

    @property
    def open_link(self) -> AgentLink:
        if self.link is None:
            raise PlacementFailed(f"the agent on {self.host or 'a machine'} was lost")
        return self.link

    @property
    def keys(self) -> set[str]:
        return {life.key for life in self.lives}

    @property
    def has_connected(self) -> bool:
        """Whether a worker here still has its channel."""
        return any(life.is_connected for life in self.lives)

    def send(self, message: ToAgent) -> None:
        if self.link is not None:
            self.link.send(message)

    def leave(self, life: PlacedWorker) -> None:
        self.lives.discard(life)
        if self.link is not None:
            self.link.workers.pop(life.key, None)


class SlotPlacement:
    """Asks for machines when a worker needs them, keeps them between its lives, and asks again when they are lost."""

    def __init__(self, cluster: Cluster, request: PlacementRequest) -> None:
        self.request = request
        self.port: WorkerPort = cluster.port
        self.seats = [Seat(number) for number in range(request.num_nodes)]
        self.acquired_at = 0.0  # on the monotonic clock; 0: it waits
        self._cluster = cluster
        self._tokens: dict[str, list[str]] = {}  # by Place
        self._asked_at = 0.0  # 0: it has not asked
        self._reason = ""  # why there is no machine yet, if the placer has said it
        self._problem = ""  # why the machine that was given cannot be used
        self._changed = asyncio.Event()
        self._port_number = 0  # where the processes of a group meet
        self._num_lost = 0  # Places in a row that came to nothing
        self._is_closed = False

    # ---- what others see ----

    @property
    def is_open(self) -> bool:
        return all(seat.is_open for seat in self.seats)

    @property
    def node(self) -> str:
        hosts = [seat.host for seat in self.seats if seat.node]
        return ", ".join(hosts) if self.acquired_at else ""

    @property
    def waiting(self) -> str:
        if self.acquired_at or not self._asked_at:
            return ""
        waited_s = time.monotonic() - self._asked_at
        return waiting_in_words(self.request.demand, self.request.num_nodes, waited_s, self._reason)

    @property
    def node_ids(self) -> list[str]:
        return [seat.node for seat in self.seats if seat.node] if self.acquired_at else []

    @property
    def agent_pids(self) -> list[int]:
        return [seat.link.joined.pid for seat in self.seats if seat.link is not None and seat.link.joined is not None]

    @property
    def num_neighbors(self) -> int:
        return min((self._cluster.num_on(seat.node) for seat in self.seats if seat.node), default=0)

    def new_life(
        self, spec: WorkerSpec, new_channel: Callable[[], ServerChannel], output: WorkerOutput
    ) -> PlacedWorker:
        return PlacedWorker(spec, new_channel, output, self)

    def gpu_id(self, rank: int) -> int | None:
        """The number of a rank's GPU among those that it sees."""
        if not self.request.demand.gpus:
            return None
        return rank % self.request.ranks_per_node

    async def seat_of(self, rank: int) -> Seat:
        """The seat of a rank, once there are machines for all; raises PlacementFailed."""
        await self._acquire()
        return self.seats[rank // self.request.ranks_per_node]

    async def group_environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun sets, as far as they depend on the machines."""
        request = self.request
        if request.num_nodes * request.ranks_per_node == 1:
            return {}
        if rank == 0:
            self._port_number = await self.seats[0].open_link.find_port()
            self._wake()
        else:
            while not self._port_number:
                await self._changed.wait()
        return {
            "LOCAL_RANK": str(rank % request.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(request.ranks_per_node),
            "GROUP_RANK": str(rank // request.ranks_per_node),
            "GROUP_WORLD_SIZE": str(request.num_nodes),
            "MASTER_ADDR": self.seats[0].address,
            "MASTER_PORT": str(self._port_number),
        }

    def close(self) -> None:
        """Give the machines back; its workers have ended."""
        if not self._is_closed:
            self._is_closed = True
            self._release()
            self._cluster.forget(self)

    # ---- asking for machines ----

    async def _acquire(self) -> None:
        if not self.is_open:
            self.acquired_at = 0.0
            if not self._asked_at:
                self._ask()
            deadline_s = self._asked_at + self.request.timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, deadline_s)):
                    while not self.is_open and not self._problem:
                        await self._changed.wait()
            except TimeoutError:
                problem = f"{self.waiting}; placementTimeout is {self.request.timeout_s:g} s"
                self._release()
                raise PlacementFailed(problem) from None
            if self._problem:
                problem, self._problem = self._problem, ""
                self._release()
                raise PlacementFailed(problem)
        self.acquired_at = self.acquired_at or time.monotonic()
        self._asked_at, self._reason = 0.0, ""
        self._port_number = self._num_lost = 0

    def _ask(self) -> None:
        """Ask for all machines anew: those of a group are given together."""
        self._release()
        self._asked_at = time.monotonic()
        self._send_place([*self.seats], node="", host="")

    def _send_place(self, seats: list[Seat], *, node: str, host: str) -> None:
        request, demand = self.request, self.request.demand
        place_id = f"{request.model}-{next(_ids)}"
        tokens = [self._expect(seat, place_id) for seat in seats]
        self._tokens[place_id] = tokens
        for seat in seats:
            seat.place_id = place_id
        self._cluster.place(
            Place(
                id=place_id,
                agents=[f"{place_id}-{seat.number}" for seat in seats],
                tokens=tokens,
                address=self.port.address,
                fingerprint=self.port.fingerprint,
                heartbeat_s=self._cluster.config.heartbeat_s,
                cpus=demand.cpus,
                gpus=demand.gpus,
                resources={**demand.resources},
                pack=request.pack,
                node=node,
                host=host,
                avoid=[] if node else self._cluster.suspects(),
            ),
            self,
        )

    def _expect(self, seat: Seat, place_id: str) -> str:
        def on_joined(link: AgentLink) -> None:
            self._on_joined(seat, place_id, link)

        def on_closed(link: AgentLink) -> None:
            self._on_agent_lost(seat, link)

        return self.port.expect(lambda: AgentLink(on_joined, on_closed).channel)

    def _release(self) -> None:
        self.acquired_at = self._asked_at = 0.0
        for place_id in {*self._tokens}:
            self._withdraw(place_id)
        for seat in self.seats:
            link, seat.link = seat.link, None
            if link is not None:
                link.close()

    def _withdraw(self, place_id: str) -> None:
        for token in self._tokens.pop(place_id, ()):
            self.port.forget(token)
        self._cluster.remove(Remove(place_id))

    # ---- what happens to agents ----

    def _on_joined(self, seat: Seat, place_id: str, link: AgentLink) -> None:
        joined = link.joined
        assert joined is not None
        if self._is_closed or seat.place_id != place_id:  # it is late
            link.close()
            return
        if (theirs := joined.versions.get("flambeau")) != __version__:
            self._problem = (
                f"{joined.host} has flambeau {theirs} and this server {__version__}; install the same version there"
            )
            link.close()
        else:
            has_same = (seat.host, seat.devices) == (joined.host, joined.devices)
            seat.link, seat.node, seat.host = link, joined.node, joined.host
            seat.address, seat.devices = joined.address, joined.devices
            for life in [*seat.lives]:
                self._hand_over(life, link, has_same=has_same)
        self._wake()

    def _hand_over(self, life: PlacedWorker, link: AgentLink, *, has_same: bool) -> None:
        """Let a new agent watch a worker that an earlier one has started."""
        if (adoption := life.adoption) is not None and has_same:
            link.workers[life.key] = life
            link.send(adoption)
        else:
            life.kill(WorkerExit(reason="its agent was lost, and its devices were given to others", spares_jobs=True))

    def _on_agent_lost(self, seat: Seat, link: AgentLink) -> None:
        if seat.link is not link:
            return
        seat.link = None
        for life in [*seat.lives]:
            life.on_agent_lost()
        if not self._is_closed:
            logger.warning("%s: the agent on %s was lost", self.request.model, seat.host)
            asyncio.get_running_loop().call_later(ORPHAN_S, self._replace_agent, seat)
        self._wake()

    def _replace_agent(self, seat: Seat) -> None:
        """Ask for another agent on the machine of a worker that goes on; otherwise the machine is probably lost."""
        if self._is_closed or seat.link is not None:
            return
        if seat.has_connected:
            if len(self.seats) == 1:
                self._withdraw(seat.place_id)
            self._send_place([seat], node=seat.node, host=seat.host)
        elif not self.acquired_at:  # it asks already, for a new worker
            return
        else:
            self.acquired_at = 0.0

    def on_node_lost(self, seat: Seat) -> None:
        self._cluster.suspect(seat.node)

    def doubt_agent(self, seat: Seat) -> None:
        """Use an agent no longer that has not reported the end of its worker, unless it is only slow."""
        if (link := seat.link) is not None:
            link.expect_message(self._cluster.config.heartbeat_s, partial(self._drop_agent, seat, link))

    def _drop_agent(self, seat: Seat, link: AgentLink) -> None:
        if seat.link is link:
            self.on_node_lost(seat)
            link.close()
            self._on_agent_lost(seat, link)

    # ---- messages of the placer ----

    def on_waiting(self, reason: str) -> None:
        self._reason = reason

    def on_place_lost(self, place_id: str, reason: str) -> None:
        """The cluster could not start these agents, or has ended them."""
        seats = [seat for seat in self.seats if seat.place_id == place_id and seat.link is None]
        if not seats or self._is_closed:
            return
        self._reason = reason
        self._num_lost += 1
        delay_s = RETRIES_S[min(self._num_lost, len(RETRIES_S)) - 1]
        logger.warning("%s: no agent could be started; tried again in %g s: %s", self.request.model, delay_s, reason)
        asyncio.get_running_loop().call_later(delay_s, self._retry, place_id)

    def _retry(self, place_id: str) -> None:
        if self._is_closed or place_id not in self._tokens:
            return
        self.ask_again()

    def ask_again(self) -> None:
        """There is a new placer, or the last attempt failed."""
        for seat in self.seats:
            if seat.link is None and seat.has_connected:
                self._withdraw(seat.place_id)
                self._send_place([seat], node=seat.node, host=seat.host)
        if self._asked_at and not any(seat.has_connected for seat in self.seats):
            asked_at, reason = self._asked_at, self._reason
            self._ask()
            self._asked_at, self._reason = asked_at, reason  # the time-out goes on

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
