"""The machines of a cluster and the workers there, as a document."""

from __future__ import annotations

from typing import Any

from flambeau.errors import BadRequest
from flambeau.frontend.operations import failure_document, state_of
from flambeau.serving.server import Server
from flambeau.serving.workers.supervisor import Slot

NO_CLUSTER = "This server has no cluster; start it with --cluster ray, or --cluster ray=HOST:6379."


async def cluster_document(server: Server) -> dict[str, Any]:
    """Machines, and where each worker runs or what it waits for."""
    cluster = server.cluster
    if cluster is None:
        raise BadRequest(NO_CLUSTER)
    document: dict[str, Any] = {
        "manager": cluster.config.manager,
        "connection": cluster.connection,
        "workerAddress": cluster.port.address,
        "placer": {"pid": cluster.placer.pid, "restarts": cluster.placer.num_restarts},
        "workers": [
            placed_document(slot, model.name, details=server.config.shows_error_details)
            for model in server.registry
            for slot in model.pool.slots
        ],
    }
    try:
        nodes = await cluster.nodes()
    except TimeoutError as error:
        text = "the placer does not answer; is the cluster up?"
        return {**document, "nodes": [], "problem": f"{text} {error}".strip()}
    document["nodes"] = [
        {
            "id": node.id,
            "host": node.host,
            "address": node.address,
            "alive": node.is_alive,
            "resources": node.resources,
            "workers": cluster.num_on(node.id),
        }
        for node in nodes
    ]
    return document


def placed_document(slot: Slot, model: str, *, details: bool) -> dict[str, Any]:
    worker, placement = slot.worker, slot.placement
    document: dict[str, Any] = {
        "model": model,
        "id": slot.id,
        "state": state_of(slot),
        "pids": worker.pids if worker else [],
        "node": placement.node if placement is not None else "this machine",
    }
    if placement is not None:
        document["nodeIds"] = placement.node_ids
        document["agents"] = placement.agent_pids
    if slot.last_exit is not None:
        document["lastFailure"] = failure_document(slot.last_exit, slot.bundle, details=details)
    return document
