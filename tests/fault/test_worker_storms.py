"""Workers that come and go in numbers: no descriptor is closed twice, and every client gets its own answer."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from support.archives import pack_handler
from support.running import Load, children_of, is_running

STORM_S = 1.5
MANY, ONE = "min_worker=6&max_worker=6", "min_worker=1&max_worker=1"
GROUPS = "parallelType: pp\ndeviceType: cpu\nminWorkers: 1\nmaxWorkers: 1\ntorchrun:\n    nproc-per-node: 2\n"


@contextmanager
def asked_all_along(server, model="echo", threads=2):
    """Ask the model beside a storm; afterwards the server lives, and each answer was that of its own request."""
    numbers = itertools.count()

    def ask():
        number = next(numbers)
        word = f"request-{number}"
        body = word * (1 if number % 10 else 20_000)  # a large one is received into shared memory
        reply = server.predict(model, body.encode(), headers={"X-Request-Id": word}, timeout=20)
        assert (reply.status, reply.headers["x-request-id"]) == (200, word)
        assert reply.json["row"]["body"] == ["bytearray", body]
        return reply

    with Load(ask, threads) as load:
        yield
        assert server.process.poll() is None, server.log
        seen = len(load.replies)
        server.until(lambda: load.errors or len(load.replies) > seen + 5, timeout=20)
    assert load.errors == []
    assert server.process.poll() is None
    assert server.stop(timeout=40) == 0
    assert "Bad file descriptor" not in server.log
    assert "could not be started or watched" not in server.log


def for_a_while(action, seconds=STORM_S):
    """Do it again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        action()


def pipeline(server, *requests):
    """Send management requests in one piece; return the statuses of the answers."""
    with socket.create_connection(("127.0.0.1", server.management_port), timeout=20) as client:
        client.sendall(b"".join(f"{one} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for one in requests))
        received = b""
        while received.count(b"HTTP/1.1 ") < len(requests):
            received += (chunk := client.recv(65536))
            assert chunk, f"the connection was cut after {received!r}"
    return [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("config", [None, GROUPS], ids=["workers", "groups"])
def test_scaling_up_and_down_at_once_harms_no_client(start, tmp_path, config):
    server = start(pack_handler(tmp_path, "echo", config=config)).wait_ready()
    with asked_all_along(server):
        for_a_while(lambda: up_and_down(server))


def up_and_down(server):
    assert pipeline(server, f"PUT /models/echo?{MANY}", f"PUT /models/echo?{ONE}") == [b"202", b"202"]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_workers_killed_while_they_start_harm_no_client(start, transport):
    server = start("echo.py", "--worker-transport", transport).wait_ready()
    (spared,) = server.worker_pids("echo")
    is_over = threading.Event()

    def kill_beginners():
        while not is_over.is_set():
            for pid in children_of(server.process.pid):
                if pid != spared:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_beginners)
    with asked_all_along(server):
        killer.start()
        try:
            for_a_while(lambda: grow_and_shrink(server))
        finally:
            is_over.set()
            killer.join()
        assert "killed by SIGKILL" in server.log  # as workers die at any other time
        assert server.manage("PUT", "/models/echo?min_worker=2&max_worker=2&synchronous=true").status == 200


def grow_and_shrink(server):
    assert server.manage("PUT", f"/models/echo?{MANY}").status == 202
    time.sleep(0.1)  # the workers start, and are killed
    assert server.manage("PUT", f"/models/echo?{ONE}").status == 202


def test_models_that_come_and_go_harm_no_client(start, tmp_path):
    archive = pack_handler(tmp_path, "echo", name="other")
    server = start("echo.py", "--model-store", tmp_path).wait_ready()

    def come_and_go(name):
        register = f"/models?url={archive.name}&model_name={name}&initial_workers=2&synchronous=false"
        assert server.manage("POST", register).status in (200, 202)
        assert server.manage("DELETE", f"/models/{name}").status == 200

    with asked_all_along(server), ThreadPoolExecutor(4) as clients:
        names = [f"other-{i}" for i in range(4)]
        assert [*clients.map(lambda name: for_a_while(lambda: come_and_go(name), 2.5), names)] == [None] * 4


def kill_all(pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_scaling_down_while_workers_die_leaves_ready_ones(start):
    server = start("echo.py", "--workers", "4").wait_ready()
    scale = "/models/echo?min_worker={0}&max_worker={0}&synchronous=true"

    def shrink_and_grow():
        pids = server.worker_pids("echo")
        kill_all(victims := pids[: len(pids) // 2])  # in the first slots: the newest are ready
        server.until(lambda: not any(map(is_running, victims)))
        assert server.manage("PUT", scale.format(1), timeout=60).status == 200
        assert len(server.worker_pids("echo")) == 1
        assert server.manage("PUT", scale.format(4), timeout=60).status == 200

    with asked_all_along(server):
        for_a_while(shrink_and_grow)


def test_probes_are_answered_while_many_workers_start(start):
    server = start("echo.py").wait_ready()
    scale = "/models/echo?min_worker=30&max_worker=30&synchronous=true"
    (scaling,) = server.at_once(lambda path: server.manage("PUT", path, timeout=120), [scale])
    times_s = []
    while not scaling.done():
        asked = time.monotonic()
        assert server.request("GET", "/livez").status == 200
        times_s.append(time.monotonic() - asked)
    assert scaling.result().status == 200
    assert len(server.worker_pids("echo")) == 30
    assert max(times_s) < 1.0  # on a busy machine; on the event loop they took seconds
