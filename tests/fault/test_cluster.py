"""Workers on other machines, which are processes of this one: whatever dies, the clients do not notice."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import time
from pathlib import Path

import pytest

from support.running import HANDLERS, Load, RunningServer, is_running

NAP_S = 0.02
PACKED = "minWorkers: 2\nmaxWorkers: 2\ncluster: {spread: pack, cpus: 0.5}\n"
GREEDY = "minWorkers: 1\nmaxWorkers: 1\ncluster: {gpus: 9, placementTimeout: 3600}\n"
GROUP = (
    "minWorkers: 1\nmaxWorkers: 1\nparallelType: pp\ndeviceType: cpu\n"
    "torchrun: {nnodes: 2, nproc-per-node: 1}\ncluster: {cpus: 0.5}\n"
)
HANGING = "minWorkers: 1\nmaxWorkers: 1\nhangTimeoutInSec: 0.5\n"
TIMED = "minWorkers: 1\nmaxWorkers: 1\nhangDetection: false\nresponseTimeout: 2\n"
HERE = "minWorkers: 2\nmaxWorkers: 2\ncluster: {here: 1}\n"


def new_model(store, name, handler, config):
    folder = store / name
    folder.mkdir(parents=True)
    (folder / "handler.py").write_text((HANDLERS / handler).read_text())
    (folder / "model-config.yaml").write_text(config)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for name, config in (("packed", PACKED), ("greedy", GREEDY), ("here", HERE)):
        new_model(store, name, "napper.py", config)
    return store


@pytest.fixture(scope="module")
def server(tmp_path_factory, store):
    log = tmp_path_factory.mktemp("cluster") / "server.log"
    server = RunningServer(
        log,
        str(HANDLERS / "napper.py"),
        *("--model-store", str(store), "--workers", "2"),
        *("--cluster", "local=3x8", "--worker-address", "127.0.0.1:0"),
    ).wait_ready()
    yield server
    assert server.stop(timeout=40) == 0
    assert not server.logged("Traceback")


def cluster(server):
    return server.manage("GET", "/cluster").json


def workers(server, model="napper"):
    return [worker for worker in cluster(server)["workers"] if worker["model"] == model]


def settled(server, number=2, model="napper"):
    """The workers of a model, once all are ready and have agents."""

    def found():
        those = workers(server, model)
        is_settled = len(those) == number and all(w["state"] == "ready" and w["agents"] for w in those)
        return those if is_settled else None

    return server.until(found)


def nap(server):
    return lambda: server.predict("napper", {"sleep_s": NAP_S})


def check(load):
    assert load.errors == []
    assert {reply.status for reply in load.replies} == {200}


def test_workers_are_spread_over_the_nodes(server):
    nodes = [worker["node"] for worker in settled(server)]
    assert len({*nodes}) == 2
    described = server.describe("napper")["workers"]
    assert [worker["node"] for worker in described] == nodes
    assert all(worker["memoryUsage"] > 1 << 20 for worker in server.until(lambda: measured(server)))
    assert sum(node["workers"] for node in cluster(server)["nodes"]) == 2


def measured(server):
    found = server.describe("napper")["workers"]
    return found if all(worker["memoryUsage"] for worker in found) else None


def test_killed_worker_is_replaced_by_its_agent(server):
    [victim, other] = settled(server)
    with Load(nap(server), 4) as load:
        os.kill(victim["pids"][0], signal.SIGKILL)
        server.until(lambda: settled(server)[0]["pids"] != victim["pids"])
    check(load)
    [fresh, untouched] = settled(server)
    assert fresh["agents"] == victim["agents"]
    assert untouched["pids"] == other["pids"]
    assert "SIGKILL" in fresh["lastFailure"]["reason"]


def test_an_agent_that_is_only_slow_keeps_its_place(server):
    """On a busy machine it reports the end of its worker late."""
    [victim, _] = settled(server)
    [agent] = victim["agents"]
    with Load(nap(server), 4) as load:
        os.kill(agent, signal.SIGSTOP)
        os.kill(victim["pids"][0], signal.SIGKILL)
        server.until(lambda: "was lost" in (workers(server)[0].get("lastFailure") or {"reason": ""})["reason"])
        os.kill(agent, signal.SIGCONT)
        server.until(lambda: settled(server)[0]["pids"] != victim["pids"])
    check(load)
    assert settled(server)[0]["agents"] == [agent]


def test_worker_goes_on_when_its_agent_is_killed(server):
    before = settled(server)
    with Load(nap(server), 4) as load:
        os.kill(before[0]["agents"][0], signal.SIGKILL)
        server.until(lambda: not is_running(before[0]["agents"][0]))
        after = server.until(lambda: fresh_agents(server, before))
    check(load)
    assert [worker["pids"] for worker in after] == [worker["pids"] for worker in before]
    # The new agent reports its end, though it has not started it.
    os.kill(after[0]["pids"][0], signal.SIGKILL)
    server.until(lambda: settled(server)[0]["pids"] != after[0]["pids"])


def fresh_agents(server, before):
    now = settled(server)
    return now if now[0]["agents"] != before[0]["agents"] else None


def test_worker_moves_when_its_node_is_lost(server):
    [victim, _] = settled(server)
    with Load(nap(server), 4) as load:
        for pid in (*victim["agents"], *victim["pids"]):
            os.kill(pid, signal.SIGKILL)
        server.until(lambda: settled(server)[0]["pids"] != victim["pids"])
    check(load)
    [moved, _] = settled(server)
    assert moved["node"] != victim["node"]
    assert "was lost" in moved["lastFailure"]["reason"]


def test_workers_go_on_when_the_placer_is_killed(server):
    before = settled(server)
    placer = cluster(server)["placer"]["pid"]
    with Load(nap(server), 4) as load:
        os.kill(placer, signal.SIGKILL)
        server.until(lambda: cluster(server)["placer"]["pid"] not in (0, placer))
        after = server.until(lambda: fresh_agents(server, before))
    check(load)
    assert [worker["pids"] for worker in after] == [worker["pids"] for worker in before]


def test_output_of_a_placed_worker_is_logged(server, store):
    new_model(store, "talker", "faulty.py", "minWorkers: 1\nmaxWorkers: 1\n")
    assert server.manage("POST", "/models?url=talker&initial_workers=1&synchronous=true").status == 200
    reply = server.predict("talker", {"do": "exit", "code": 8})
    assert reply.status == 500
    assert "about to exit" in reply.cause
    assert "exited with code 8" in reply.cause
    assert server.manage("DELETE", "/models/talker").status == 200


def test_model_that_finds_no_room_says_what_it_waits_for(server):
    assert server.manage("POST", "/models?url=greedy&initial_workers=1&synchronous=false").status == 202
    [worker] = server.until(lambda: [w for w in workers(server, "greedy") if w["state"].startswith("waiting")])
    assert worker["state"].startswith("waiting for a node with 9 GPUs and ") or "9 GPUs" in worker["state"]
    assert server.describe("greedy")["workers"][0]["state"].startswith("waiting for a node with 9 GPUs, ")
    assert server.manage("DELETE", "/models/greedy").status == 200


def test_packed_workers_share_a_node(server):
    assert server.manage("POST", "/models?url=packed&initial_workers=2&synchronous=true").status == 200
    assert len({worker["node"] for worker in settled(server, model="packed")}) == 1
    assert server.manage("DELETE", "/models/packed").status == 200


def test_some_workers_may_stay_here(server):
    assert server.manage("POST", "/models?url=here&initial_workers=2&synchronous=true").status == 200
    places = [worker["node"] for worker in workers(server, "here")]
    assert places[0] == "this machine" != places[1]
    assert server.manage("DELETE", "/models/here").status == 200


def test_workers_and_agents_of_a_removed_model_end(server, store):
    new_model(store, "brief", "napper.py", "minWorkers: 1\nmaxWorkers: 1\n")
    assert server.manage("POST", "/models?url=brief&initial_workers=1&synchronous=true").status == 200
    [worker] = settled(server, 1, "brief")
    assert server.manage("DELETE", "/models/brief").status == 200
    server.until(lambda: not any(map(is_running, (*worker["pids"], *worker["agents"]))))


def test_group_over_two_nodes_starts_and_restarts_as_one(server, store):
    new_model(store, "led", "led.py", GROUP)
    assert server.manage("POST", "/models?url=led&initial_workers=1&synchronous=true").status == 200
    [worker] = settled(server, 1, "led")
    assert len({*worker["nodeIds"]}) == 2
    ranks = [environment_of(pid) for pid in worker["pids"]]
    assert [(one["RANK"], one["LOCAL_RANK"], one["GROUP_RANK"]) for one in ranks] == [("0", "0", "0"), ("1", "0", "1")]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in ranks}) == 1
    assert server.predict("led").json == {"rank": "0", "calls": 1}
    os.kill(worker["pids"][1], signal.SIGKILL)
    server.until(lambda: not is_running(worker["pids"][0]))
    assert server.predict("led").json == {"rank": "0", "calls": 1}  # new processes
    assert server.manage("DELETE", "/models/led").status == 200


def environment_of(pid):
    return dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in one)


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b""], ids=["plain", "silent"])
def test_stranger_without_tls_is_refused(server, greeting):
    with dial(server) as sock:
        sock.sendall(greeting)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(20)
        assert sock.recv(100)[:1] in (b"", b"\x15")  # closed, maybe after an alert of TLS
    server.until(lambda: server.logged("worker port", "127.0.0.1", level="WARNING"))
    assert nap(server)().status == 200


def test_stranger_with_a_made_up_token_is_refused(server):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    time.sleep(1.1)  # at most one line a second
    with dial(server) as sock, context.wrap_socket(sock) as tls:
        tls.sendall(b"0" * 64)
        tls.settimeout(20)
        assert tls.recv(100) == b""
    server.until(lambda: server.logged("worker port", "token", level="WARNING"))
    assert nap(server)().status == 200


def dial(server):
    host, _, port = cluster(server)["workerAddress"].rpartition(":")
    return socket.create_connection((host, int(port)))


def test_scaling_down_empties_a_node(server):
    assert server.manage("PUT", "/models/napper?min_worker=4&max_worker=4&synchronous=true").status == 200
    assert server.manage("PUT", "/models/napper?min_worker=2&max_worker=2&synchronous=true").status == 200
    server.until(lambda: len(settled(server)) == 2)
    assert len({worker["node"] for worker in settled(server)}) == 1


@pytest.fixture(scope="module")
def hanging(server, store):
    new_model(store, "hanging", "hanging.py", HANGING)
    assert server.manage("POST", "/models?url=hanging&initial_workers=1&synchronous=true").status == 200
    for _ in range(25):  # the server learns that the model is quick
        assert server.predict("hanging", {"do": "answer"}).status == 200
    yield
    assert server.manage("DELETE", "/models/hanging").status == 200


def test_placed_worker_that_hangs_is_replaced_and_leaves_its_stacks(server, hanging):
    reply = server.predict("hanging", {"do": "lock"}, timeout=100)
    assert reply.status == 500
    assert "it hung" in reply.cause
    assert "obey, line" in reply.cause
    failure = server.describe("hanging")["workers"][0]["lastFailure"]
    assert failure["hung"]
    bundle = Path(failure["bundle"])
    server.until((bundle / "bundle.json").exists)
    stacks = (bundle / "stacks.txt").read_text()
    assert "in obey" in stacks
    assert "system call" in stacks
    document = json.loads((bundle / "bundle.json").read_text())
    assert (document["kind"], document["requests"][0]["crashes"]) == ("hang", 2)
    assert document["worker"]["node"].startswith(socket.gethostname())


def test_stopped_placed_worker_is_replaced(server, hanging):
    [worker] = settled(server, 1, "hanging")
    os.kill(worker["pids"][0], signal.SIGSTOP)
    server.until(lambda: settled(server, 1, "hanging")[0]["pids"] != worker["pids"])
    assert "SIGSTOP" in server.failure("hanging")
    assert server.predict("hanging", {"do": "answer"}).status == 200


def test_placed_worker_that_times_out_leaves_its_stacks(server, store):
    new_model(store, "timed", "hanging.py", TIMED)
    assert server.manage("POST", "/models?url=timed&initial_workers=1&synchronous=true").status == 200
    reply = server.predict("timed", {"do": "lock"}, timeout=100)
    assert "no answer within responseTimeout, 2 s" in reply.cause
    assert "in obey" in reply.cause
    assert server.manage("DELETE", "/models/timed").status == 200


def test_nothing_is_left_of_a_killed_server(tmp_path):
    server = RunningServer(
        tmp_path / "server.log",
        *(str(HANDLERS / "napper.py"), "--cluster", "local=1", "--worker-address", "127.0.0.1:0"),
    ).wait_ready()
    [worker] = settled(server, 1)
    pids = [*worker["pids"], *worker["agents"], cluster(server)["placer"]["pid"]]
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_an_agent_that_hangs_is_replaced(server):
    """It is the last test of this server: nothing is placed on the agent's machine for a while."""
    [victim, _] = settled(server)
    [agent] = victim["agents"]
    with Load(nap(server), 4) as load:
        os.kill(agent, signal.SIGSTOP)
        os.kill(victim["pids"][0], signal.SIGKILL)
        server.until(lambda: settled(server)[0]["pids"] != victim["pids"], timeout=60)
    check(load)
    assert settled(server)[0]["agents"] != [agent]
    server.until(lambda: not is_running(agent))
