"""The graph of a workflow: from one start, without a way back (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flambeau.errors import InvalidGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in an order in which each comes after all that lead to it."""

    edges: Mapping[str, Sequence[str]]  # as they were given
    order: Sequence[str]
    before: Mapping[str, Sequence[str]]  # what leads to a node
    leaves: Sequence[str]

    @classmethod
    def of(cls, edges: Mapping[str, Sequence[str]]) -> Graph:
        """Check the edges; the texts are TorchServe's, and `cause` names the nodes."""
        nodes = list(dict.fromkeys(name for node, followers in edges.items() for name in (node, *followers)))
        before = {node: [other for other in edges if node in edges[other]] for node in nodes}
        if loops := [node for node in nodes if node in before[node]]:
            raise InvalidGraph("Self loop exception", cause=f"{loops[0]} follows itself")
        starts = [node for node in nodes if not before[node]]
        if len(starts) != 1:
            raise InvalidGraph(
                "DAG should have only one start node",
                cause=f"those that follow no other are: {', '.join(starts) or 'none'}",
            )
        order = _in_order(nodes, before)
        if len(order) != len(nodes):
            stuck = [node for node in nodes if node not in order]
            raise InvalidGraph("Not a valid DAG", cause=f"there is a way back to where it began among {stuck}")
        return cls(edges=edges, order=order, before=before, leaves=[node for node in order if not edges.get(node)])

    def __str__(self) -> str:
        """The text that `describe` shows, as TorchServe wrote it."""
        parts = (f"{node}=[{', '.join(followers)}]" for node, followers in self.edges.items())
        return "{" + ", ".join(parts) + "}"


def _in_order(nodes: Sequence[str], before: Mapping[str, Sequence[str]]) -> list[str]:
    order: list[str] = []
    waiting = list(nodes)
    while ready := [node for node in waiting if all(other in order for other in before[node])]:
        order += ready
        waiting = [node for node in waiting if node not in ready]
    return order
