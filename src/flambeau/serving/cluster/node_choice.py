"""Which machine gets the next worker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from flambeau.wire.cluster_messages import NodeInfo, Place

Amounts = Mapping[str, float]


def demand_of(place: Place) -> dict[str, float]:
    """What one agent of a Place takes of its machine."""
    wanted = {"CPU": place.cpus, "GPU": place.gpus, **place.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def has_room(node: NodeInfo, used: Amounts, demand: Amounts) -> bool:
    return all(node.resources.get(name, 0.0) - used.get(name, 0.0) >= amount for name, amount in demand.items())


def allowed(nodes: Sequence[NodeInfo], place: Place) -> list[NodeInfo]:
    """The machines that a Place may use: those that live and are not avoided, or the one that it names."""
    alive = [node for node in nodes if node.is_alive]
    if place.node:
        exact = [node for node in alive if node.id == place.node]
        return exact or [node for node in alive if node.host == place.host]
    demand = demand_of(place)
    good = [node for node in alive if node.id not in place.avoid and has_room(node, {}, demand)]
    return good or alive  # if only machines that seem lost could ever have room, one of them is tried


def choose(
    nodes: Sequence[NodeInfo], place: Place, used: Mapping[str, Amounts], occupants: Collection[str]
) -> list[NodeInfo]:
    """One machine for each agent, no two on the same; empty if there is no room.

    `used` is what this server has taken of each machine, `occupants` has the machine of each of its agents.
    """
    demand = demand_of(place)
    load = Counter(occupants)
    fitting = [node for node in allowed(nodes, place) if has_room(node, used.get(node.id, {}), demand)]
    fitting.sort(key=lambda node: (-load[node.id] if place.pack else load[node.id], node.id))
    count = len(place.agents)
    return fitting[:count] if len(fitting) >= count else []
