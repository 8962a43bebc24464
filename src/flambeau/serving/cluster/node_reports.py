"""survey(): a report of every machine of a cluster with its versions, before there is any model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from flambeau.config.server import ClusterConfig
from flambeau.serving.cluster.agent_link import AgentLink
from flambeau.serving.cluster.cluster import Cluster
from flambeau.serving.workers.host_resources import count_cores
from flambeau.serving.workers.launcher import Launcher
from flambeau.wire.cluster_messages import NodeInfo, Place, Remove

CONNECT_S = 60.0  # for the placer to reach the cluster
MAX_RESTARTS = 2  # of the placer: it ends if there is no cluster
ANSWER_S = 60.0  # for a machine to start an agent
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A machine and what is installed there; a problem if it did not answer."""

    node: NodeInfo
    versions: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


async def survey(config: ClusterConfig) -> list[NodeReport]:
    """The machines of a cluster that can run workers; raises TimeoutError with the last words of the placer."""
    launcher = Launcher(count_cores())
    cluster = Cluster(config, launcher)
    try:
        await cluster.open()
        await _connected(cluster)
        nodes = [node for node in await cluster.nodes() if node.is_alive and node.resources.get("CPU")]
        return [*await asyncio.gather(*(_ask(cluster, node) for node in nodes))]
    finally:
        await cluster.close()
        await asyncio.to_thread(launcher.close)


async def _connected(cluster: Cluster) -> None:
    try:
        async with asyncio.timeout(CONNECT_S):
            while not cluster.connection:
                if cluster.placer.num_restarts >= MAX_RESTARTS and cluster.problem:
                    raise TimeoutError
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise TimeoutError(cluster.problem or "the placer does not answer") from None


async def _ask(cluster: Cluster, node: NodeInfo) -> NodeReport:
    """Start an agent there, read its first message, and end it."""
    joined: asyncio.Future[AgentLink] = asyncio.get_running_loop().create_future()
    token = cluster.port.expect(lambda: AgentLink(joined.set_result, lambda link: None).channel)
    name = f"survey-{node.id}"
    port = cluster.port
    place = Place(name, [name], [token], port.address, port.fingerprint, cpus=0, node=node.id, host=node.host)
    cluster.placer.send(place)
    try:
        link = await asyncio.wait_for(joined, ANSWER_S)
    except TimeoutError:
        return NodeReport(node, problem=f"no agent connected to {port.address} within {ANSWER_S:g} s")
    finally:
        port.forget(token)
        cluster.placer.send(Remove(name))
    link.close()
    assert link.joined is not None
    return NodeReport(node, link.joined.versions)
