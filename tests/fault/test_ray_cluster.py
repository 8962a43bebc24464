"""A real Ray cluster of two nodes on this machine: whatever dies, the clients do not notice."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from flambeau.examples.storyteller import FOLDER
from support.language_models import ONE_THREAD
from support.ray_cluster import VARIABLES, RayCluster
from support.running import HANDLERS, Load, RunningServer, free_ports, is_running
from support.streams import Stream

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # on a busy machine Ray takes its time to start
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'flambeau[ray]'"),
]
GPU = "minWorkers: 1\nmaxWorkers: 1\ndeviceType: gpu\ncluster: {cpus: 0.1, gpus: 2}\n"
GROUP = (
    "minWorkers: 1\nmaxWorkers: 1\nparallelType: tp\ndeviceType: cpu\nstartupTimeout: 300\n"
    "torchrun: {nnodes: 2, nproc-per-node: 1}\ncluster: {cpus: 0.5}\n"
)
PLAIN = "minWorkers: 2\nmaxWorkers: 2\ncluster: {cpus: 0.5}\n"
BARD = PLAIN + "resume: true\nhandler: {name: gpt_handler, model_path: target, compile: false, num_blocks: 512}\n"
NUM_STREAMS, NUM_TEXTS, TEXT_TOKENS = 4, 2, 100
MAX_GAP_S = 5.0  # the goal is 1.5 s, where the cores are not overloaded
HEAD_LOST_S = float(os.environ.get("FLAMBEAU_TEST_HEAD_LOST_S", "4"))  # 120 by hand: Ray's own limit is 60
MODELS = {
    "napper": ("napper.py", PLAIN),
    "variables": ("tensor_parallel.py", GROUP),
    "seen": ("napper.py", GPU),
}


class PatientServer(RunningServer):
    start_timeout_s = 180.0


class Timer:
    """Prints how long something took; the figures of docs/decisions/0020 come from here."""

    def __init__(self):
        self.began = time.monotonic()

    def show(self, what):
        print(f"\n{what}: {time.monotonic() - self.began:.2f} s", flush=True)


@pytest.fixture(scope="module")
def ray():
    cluster = RayCluster(free_ports(1)[0])
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for name, (handler, config) in MODELS.items():
        folder = store / name
        folder.mkdir()
        (folder / "handler.py").write_text((HANDLERS / handler).read_text())
        (folder / "model-config.yaml").write_text(config)
    shutil.copytree(FOLDER / "target", store / "bard" / "target")
    (store / "bard" / "model-config.yaml").write_text(BARD)
    return store


@pytest.fixture(scope="module")
def server(tmp_path_factory, store, ray):
    server = PatientServer(
        tmp_path_factory.mktemp("ray") / "server.log",
        *(str(store / "napper"), "--model-store", str(store), "--workers", "2"),
        *("--cluster", f"ray={ray.address}", "--worker-address", "127.0.0.1:0"),
        env={**VARIABLES, **ONE_THREAD},
    ).wait_ready()
    yield server
    assert server.stop(timeout=40) == 0


def cluster(server):
    return server.manage("GET", "/cluster").json


def workers(server, model="napper"):
    return [worker for worker in cluster(server)["workers"] if worker["model"] == model]


def settled(server, number=2, model="napper"):
    def found():
        those = workers(server, model)
        is_settled = len(those) == number and all(w["state"] == "ready" and w["agents"] for w in those)
        return those if is_settled else None

    return server.until(found)


def register(server, name, number=1):
    reply = server.manage("POST", f"/models?url={name}&initial_workers={number}&synchronous=true", timeout=120)
    assert reply.status == 200, reply.text


def nap(server):
    return lambda: server.predict("napper", {"sleep_s": 0.02})


def check(load):
    assert load.errors == []
    assert {reply.status for reply in load.replies} == {200}


def noticed(server, pid):
    """Wait until this process is not a ready worker, which stays so: a moment without it could pass between looks."""
    server.until(lambda: pid not in ready_pids(server))


def ready_pids(server, model="napper"):
    return {w["pid"] for w in server.describe(model)["workers"] if w["status"] == "READY"}


def test_workers_are_spread_over_the_nodes(server, ray):
    nodes = [worker["nodeIds"][0] for worker in settled(server)]
    assert len({*nodes}) == 2
    assert {*nodes} <= {*ray.raylets}


def test_gpus_are_given_by_ray_and_waited_for(server):
    register(server, "seen")
    [worker] = settled(server, 1, "seen")
    variables = Path(f"/proc/{worker['pids'][0]}/environ").read_text().split("\0")
    assert "CUDA_VISIBLE_DEVICES=0,1" in variables
    assert not any(one.startswith("RAY_AUTH") for one in variables)
    assert server.manage("PUT", "/models/seen?min_worker=3&max_worker=3&synchronous=false").status == 202
    server.until(lambda: sum(w["state"] == "ready" for w in workers(server, "seen")) == 2)
    [waiting] = [w for w in workers(server, "seen") if w["state"] != "ready"]
    assert waiting["state"].startswith("waiting for a node with 2 GPUs and 0.1 CPU, ")
    assert server.manage("DELETE", "/models/seen").status == 200


def test_killed_worker_is_replaced(server):
    [victim, _] = settled(server)
    with Load(nap(server), 4) as load:
        timer = Timer()
        os.kill(victim["pids"][0], signal.SIGKILL)
        noticed(server, victim["pids"][0])
        timer.show("worker killed, noticed")
        server.until(lambda: len(ready_pids(server) - {victim["pids"][0]}) == 2)
        timer.show("worker killed, capacity back")
    check(load)
    assert settled(server)[0]["agents"] == victim["agents"]


def test_worker_goes_on_when_its_agent_is_killed(server):
    before = settled(server)
    with Load(nap(server), 4) as load:
        timer = Timer()
        os.kill(before[0]["agents"][0], signal.SIGKILL)
        server.until(lambda: server.logged("the agent on", "was lost"))
        timer.show("agent killed, noticed")
        server.until(lambda: settled(server)[0]["agents"] != before[0]["agents"])
        timer.show("agent killed, another one has adopted the worker")
    check(load)
    assert [worker["pids"] for worker in settled(server)] == [worker["pids"] for worker in before]


def test_group_over_two_nodes_answers_and_restarts_as_one(server):
    register(server, "variables")
    [worker] = settled(server, 1, "variables")
    assert len({*worker["nodeIds"]}) == 2
    x = [1.0, 2.0, 3.0, 4.0]
    product = server.predict("variables", {"x": x}).json["product"]
    assert product == [80.0, 90.0, 100.0, 110.0]
    timer = Timer()
    os.kill(worker["pids"][1], signal.SIGKILL)
    server.until(lambda: not is_running(worker["pids"][0]))
    timer.show("rank killed, the other one ended")
    assert server.predict("variables", {"x": x}, timeout=120).json["product"] == product
    timer.show("rank killed, answers again")
    assert server.manage("DELETE", "/models/variables").status == 200


def tell(server, seed):
    order = {"data": "Once upon a time", "max_new_tokens": TEXT_TOKENS, "seed": seed, "stream": True}
    return Stream(server, "bard", {**order, "temperature": 1.0, "ignore_eos": True})


def test_node_is_lost_under_load_and_streams(server, ray):
    register(server, "bard", 2)
    bards = settled(server, 2, "bard")
    alone = [text.result() for text in server.at_once(lambda i: read_all(tell(server, i)), [*range(NUM_TEXTS)])]
    time.sleep(3)  # Ray prepares processes for the next agents
    node = bards[0]["nodeIds"][0]
    [victim] = [worker for worker in settled(server) if worker["nodeIds"] == [node]]
    doomed = [w for w in cluster(server)["workers"] if w.get("nodeIds") == [node]]
    assert {worker["model"] for worker in doomed} == {"napper", "bard"}
    pids = [ray.raylets[node], *(pid for w in doomed for pid in (*w["agents"], *w["pids"]))]
    with Load(nap(server), 4) as load, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [tell(server, i % NUM_TEXTS) for i in range(NUM_STREAMS)]  # two at each worker
        firsts = [stream.begin().read(4) for stream in streams]
        timer = Timer()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        rests = [pool.submit(read_rest, stream) for stream in streams]
        noticed(server, victim["pids"][0])
        timer.show("node killed, noticed")
        server.until(lambda: len(ready_pids(server) - {*victim["pids"]}) == 2)
        timer.show("node killed, capacity back")
        found = [rest.result() for rest in rests]
    check(load)
    assert [first + text for first, (text, _) in zip(firsts, found, strict=True)] == alone * 2
    gaps_s = [gap_s for _, gap_s in found]
    print(f"\nnode killed, longest gap of a stream: {max(gaps_s):.2f} s", flush=True)
    assert max(gaps_s) < MAX_GAP_S
    lost = [w for w in server.describe("bard")["workers"] if "was lost" in w.get("lastFailure", {}).get("reason", "")]
    assert len(lost) == sum(worker["model"] == "bard" for worker in doomed)  # Ray may have put both on this node
    assert {worker["nodeIds"][0] for worker in settled(server)}.isdisjoint({node})
    assert server.manage("DELETE", "/models/bard").status == 200


def read_all(stream):
    try:
        return stream.begin().read()
    finally:
        stream.leave()


def read_rest(stream):
    """The rest of a stream, and the longest time between two pieces of it."""
    text, gap_s, last = b"", 0.0, time.monotonic()
    while chunk := stream.response.read1(4096):
        now = time.monotonic()
        text, gap_s, last = text + chunk, max(gap_s, now - last), now
    stream.leave()
    return text, gap_s


def test_head_is_lost_then_the_cluster_and_both_come_back(server, ray):
    before = settled(server)
    port = int(ray.address.rpartition(":")[2])
    with Load(nap(server), 4) as load:
        os.kill(ray.gcs_pid, signal.SIGKILL)  # Ray ends its drivers and its nodes 60 s later
        time.sleep(HEAD_LOST_S)
        assert ready_pids(server) == {pid for worker in before for pid in worker["pids"]}
        ray.kill()
        server.until(lambda: not workers_with_agents(server))
        assert ready_pids(server) == {pid for worker in before for pid in worker["pids"]}
        again = RayCluster(port)
        try:
            server.until(lambda: len(workers_with_agents(server)) == 2, timeout=90)
            victim = settled(server)[0]["pids"][0]
            os.kill(victim, signal.SIGKILL)
            server.until(lambda: len(ready_pids(server) - {victim}) == 2)
        finally:
            server.stop(timeout=40) if load.errors else None
    check(load)
    print(f"\nhead lost for {HEAD_LOST_S:.0f} s, then the cluster: {len(load.replies)} requests answered", flush=True)
    again.stop()


def workers_with_agents(server):
    return [worker for worker in workers(server) if worker["agents"]]
