"""A workflow's specification: its YAML document → nodes and their graph."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flambeau.errors import InvalidGraph

ILL_FORMED = "Invalid workflow specification"
MAX_EDGES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How a node runs; the defaults are TorchServe's."""

    min_workers: int = 1
    max_workers: int = 1
    batch_size: int = 1
    max_batch_delay_ms: int = 50
    retry_attempts: int = 1
    timeout_ms: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowNode:
    """A model or, without a URL, a function of the workflow's handler."""

    name: str
    url: str | None
    settings: NodeSettings

    @property
    def is_function(self) -> bool:
        return self.url is None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """The nodes of a workflow, their graph, and the default settings."""

    nodes: Mapping[str, WorkflowNode]
    graph: WorkflowGraph
    settings: NodeSettings


_KEYS = {  # key in the document: (field, minimum)
    "min-workers": ("min_workers", 1),
    "max-workers": ("max_workers", 1),
    "batch-size": ("batch_size", 1),
    "max-batch-delay": ("max_batch_delay_ms", 0),
    "retry-attempts": ("retry_attempts", 0),
    "timeout-ms": ("timeout_ms", 1),
}
# A function has one worker and takes one request at a time, whatever the settings of the models.
_FUNCTION = {"min_workers": 1, "max_workers": 1, "batch_size": 1, "max_batch_delay_ms": 0}


def read_spec(document: Any, *, has_handler: bool) -> WorkflowSpec:
    """Read a parsed specification; raises InvalidGraph, which names the place of the error."""
    if not isinstance(document, Mapping):
        raise _ill_formed("it must be a mapping with the keys models and dag")
    models, settings = _read_models(document.get("models"))
    edges = _read_edges(document.get("dag"))
    if sum(1 + len(followers) for followers in edges.values()) > MAX_EDGES:
        raise _ill_formed(f"dag has more than {MAX_EDGES} edges; each node is a process of its own")
    graph = WorkflowGraph.of(edges)
    function = replace(settings, **_FUNCTION)
    nodes = {name: models.get(name) or WorkflowNode(name=name, url=None, settings=function) for name in graph.order}
    for node in nodes.values():
        if node.is_function and not has_handler:
            known = f"; models are {', '.join(models)}" if models else ""
            raise _ill_formed(f"dag: {node.name} is no model, and there is no handler with such a function{known}")
        if node.is_function and not node.name.isidentifier():
            raise _ill_formed(f"dag: {node.name} is no model, and no name that a function can have")
    return WorkflowSpec(nodes=nodes, graph=graph, settings=settings)


def _read_models(section: Any) -> tuple[dict[str, WorkflowNode], NodeSettings]:
    """The models and the default settings; a default applies only to the models listed after it."""
    if section is None:
        return {}, NodeSettings()
    if not isinstance(section, Mapping):
        raise _ill_formed("models must be a mapping of settings and of models by name")
    models: dict[str, WorkflowNode] = {}
    settings = NodeSettings()
    for key, value in section.items():
        if key in _KEYS:
            settings = _with(settings, key, value, "models")
        elif isinstance(value, Mapping):
            models[_name(key)] = _read_model(_name(key), value, settings)
        else:
            nearest = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ", with at least a url"
            raise _ill_formed(f"models: {key} is no setting, so it must be a mapping{hint}")
    return models, settings


def _read_model(name: str, section: Mapping[Any, Any], settings: NodeSettings) -> WorkflowNode:
    for key in _KEYS.keys() & section.keys():
        settings = _with(settings, key, section[key], f"models: {name}")
    url = section.get("url")
    if not isinstance(url, str) or not url:
        raise _ill_formed(f"models: {name} needs a url: an archive in the model store")
    return WorkflowNode(name=name, url=url, settings=settings)


def _with(settings: NodeSettings, key: str, value: Any, where: str) -> NodeSettings:
    field, least = _KEYS[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _ill_formed(f"{where}: {key} must be a whole number of at least {least}, not {reprlib.repr(value)}")
    changes: dict[str, Any] = {field: value}
    return replace(settings, **changes)


def _read_edges(section: Any) -> dict[str, list[str]]:
    if not isinstance(section, Mapping):
        raise _ill_formed("dag must be a mapping of each node to a list of those that follow it")
    edges: dict[str, list[str]] = {}
    for node, followers in section.items():
        if not isinstance(followers, list | None):
            raise _ill_formed(f"dag: what follows {node} must be a list, not {reprlib.repr(followers)}")
        names = [_name(follower) for follower in followers or () if follower not in (None, "")]
        edges[_name(node)] = [name for name in names if name.strip()]
    return edges


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise _ill_formed(f"{reprlib.repr(value)} is not text, so it cannot name a node; put it in quotes")
    return value


def _ill_formed(cause: str) -> InvalidGraph:
    return InvalidGraph(f"{ILL_FORMED}: {cause}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowGraph:
    """The nodes in topological order."""

    edges: Mapping[str, Sequence[str]]  # as given
    order: Sequence[str]
    before: Mapping[str, Sequence[str]]  # predecessors of a node
    leaves: Sequence[str]

    @classmethod
    def of(cls, edges: Mapping[str, Sequence[str]]) -> WorkflowGraph:
        """Validate the edges; the messages are TorchServe's, and `cause` names the nodes."""
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
        """The text of `describe`, in TorchServe's format."""
        parts = (f"{node}=[{', '.join(followers)}]" for node, followers in self.edges.items())
        return "{" + ", ".join(parts) + "}"


def _in_order(nodes: Sequence[str], before: Mapping[str, Sequence[str]]) -> list[str]:
    order: list[str] = []
    waiting = list(nodes)
    while ready := [node for node in waiting if all(other in order for other in before[node])]:
        order += ready
        waiting = [node for node in waiting if node not in ready]
    return order
