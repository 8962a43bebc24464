"""A Ray cluster of a head and two nodes on the loopback address, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

TOKEN = "f" * 64
VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that every part of Ray listens on 127.0.0.1 only
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # no processes for tasks that nobody sends
}
STORE_BYTES = 80 << 20


class RayCluster:
    """Two nodes of four CPUs and two GPUs each, which do not exist, and a head that runs nothing."""

    def __init__(self, port: int) -> None:
        # On a busy machine Ray gives up on its own start: then it is tried once more.
        document = self._start(port) or self._start(port)
        assert document, "the Ray cluster did not start"
        self.address: str = document["address"]
        self.gcs_pid: int = document["gcs"]
        self.raylets: dict[str, int] = document["raylets"]  # node → pid

    def _start(self, port: int) -> dict[str, Any]:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **VARIABLES},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Ray may print too
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self.stop()
        return {}

    def kill(self) -> None:
        """Kill every part of it at once."""
        for pid in (*self.raylets.values(), self.gcs_pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.stop()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main(port: int) -> None:
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.1"}
    # What a head starts for people, logs and autoscaling: each is a process that imports Ray.
    common |= {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "gcs_server_port": port, **common})
    nodes = [cluster.add_node(num_cpus=4, num_gpus=2, **common) for _ in range(2)]
    raylets = {node.node_id: node.all_processes["raylet"][0].process.pid for node in nodes}
    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    raylets[cluster.head_node.node_id] = cluster.head_node.all_processes["raylet"][0].process.pid
    print(json.dumps({"address": cluster.address, "gcs": gcs, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
