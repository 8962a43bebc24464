"""Clients that do not read what they asked for: the server holds little for them, and the others are served."""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from grpc import StatusCode

from flambeau.config.server import Address, GrpcConfig
from support.configured import ConfiguredServer
from support.grpc_calls import Client, refusal, request
from support.running import HANDLERS, free_ports
from support.unread import dial, open_streams, peak_mb, pipeline, post, resident_mb

MB = 1_000_000
STREAM = {"n": 60, "bytes": MB}  # 60 MB: less than what ended a stream before


@pytest.fixture(scope="module")
def ports():
    return free_ports(2)


@pytest.fixture(scope="module")
def server(tmp_path_factory, ports):
    """Four workers stream; clients get two seconds to read a megabyte."""
    grpc = GrpcConfig(inference=Address(port=ports[0]), management=Address(port=ports[1]))
    models = [HANDLERS / f"{name}.py" for name in ("flood", "echo", "napper")]
    folder = tmp_path_factory.mktemp("unread")
    with ConfiguredServer(folder, *models, grpc=grpc, response_read_timeout_s=2) as running:
        assert running.manage("PUT", "/models/flood?min_worker=4&synchronous=true").status == 200
        warm_up(running)
        yield running


def warm_up(server):
    assert sum(map(len, stream(server, {"n": 20, "bytes": MB}))) == 20 * MB
    assert server.predict("echo", b"x" * 1000).status == 200


def stream(server, order, pause_s=0.0):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/predictions/flood", json.dumps(order), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while data := response.read(200_000):
        yield data
        time.sleep(pause_s)
    connection.close()


class Held:
    """What the server holds within the block; it must all be free afterwards."""

    def __init__(self, server):
        self._server = server
        self.before = self._now()

    def _now(self):
        return resident_mb(self._server.process.pid)

    @property
    def peak(self):
        """How much more than before, once it has stopped growing."""
        return peak_mb(self._now) - self.before

    def is_free(self):
        return self._now() < self.before * 1.1 + 5

    def until_free(self):
        self._server.until(self.is_free)


def is_served(server):
    """Whether other clients are answered; how long it takes is for the perf tests."""
    return server.request("GET", "/livez").status == 200 and server.predict("echo", b"x").status == 200


@pytest.mark.parametrize("way", ["generator", "send"])
def test_unread_streams_cost_little_and_end(server, way):
    held = Held(server)
    with ExitStack() as stack:
        clients = open_streams(stack, server.port, 8, {**STREAM, "way": way})
        assert held.peak < 120
        assert is_served(server)
        server.until(lambda: not server.describe("flood")["jobQueueStatus"]["pendingRequests"])
        server.until(lambda: all(map(is_cut, clients)))
        assert sum(map(len, stream(server, {"n": 3, "bytes": MB}))) == 3 * MB  # no worker is held up
    held.until_free()


def is_cut(client):
    """Whether the server has reset the connection; nothing is read."""
    watch = select.poll()
    watch.register(client, 0)
    return bool(watch.poll(0))


def test_an_unread_stream_of_events_is_cut_as_well(server):
    held = Held(server)
    with ExitStack() as stack:
        [client] = open_streams(stack, server.port, 1, {**STREAM, "events": True})
        assert held.peak < 60
        server.until(lambda: is_cut(client))
    held.until_free()


def test_a_slow_but_steady_reader_gets_every_byte(server):
    received = b"".join(stream(server, {"n": 150, "bytes": 100_000}, pause_s=0.02))
    assert len(received) == 150 * 100_000
    assert [received[i * 100_000 :][:8] for i in range(150)] == [b"%08d" % i for i in range(150)]


def test_a_stream_may_pause_its_worker_longer_than_response_timeout(tmp_path):
    """The wait for a client is no fault of the worker."""
    with (
        ConfiguredServer(tmp_path, HANDLERS / "flood.py", default_response_timeout_s=1) as server,
        ExitStack() as stack,
    ):
        [pid] = server.worker_pids("flood")
        [client] = open_streams(stack, server.port, 1, {"n": 30, "bytes": MB}, window_bytes=1 << 18)
        client.settimeout(10)
        received = client.recv(100)
        time.sleep(2.5)
        size, end = len(received), received
        while not end.endswith(b"0\r\n\r\n"):
            end = client.recv(1 << 20)
            assert end
            size += len(end)
        assert size > 30 * MB
        assert server.worker_pids("flood") == [pid]


def test_a_client_that_does_not_read_holds_up_others_only_for_a_while(tmp_path):
    with ConfiguredServer(tmp_path, HANDLERS / "flood.py") as server, ExitStack() as stack:
        [client] = open_streams(stack, server.port, 1, STREAM)
        held = Held(server)
        assert held.peak < 60  # it is paused
        assert sum(map(len, stream(server, {"n": 2, "bytes": 1000}))) == 2000  # although there is one worker
        server.until(lambda: is_cut(client))
        assert server.logged("does not read", "W-9000", level="WARNING")


def test_pipelined_requests_are_not_answered_while_their_answers_are_not_read(server):
    held = Held(server)
    with ExitStack() as stack:
        for port, line in ((server.port, b"OPTIONS /"), (server.management_port, b"OPTIONS /")):
            pipeline(stack, port, line + b" HTTP/1.1\r\n\r\n", 300)
        assert held.peak < 30
        assert is_served(server)
    held.until_free()


def test_pipelined_answers_that_are_read_late_all_arrive(server):
    with ExitStack() as stack:
        client = pipeline(stack, server.metrics_port, b"GET /metrics HTTP/1.1\r\n\r\n", 500, window_bytes=1 << 16)
        client.settimeout(20)
        received = b""
        while received.count(b"HTTP/1.1 200") < 500:
            data = client.recv(1 << 20)
            assert data
            received += data


def test_bodies_wait_outside_until_the_request_before_them_is_answered(server):
    held = Held(server)
    big = post("/predictions/echo", b"x" * 3 * MB, "application/octet-stream")
    with ExitStack() as stack:
        clients = [stack.enter_context(dial(server.port, window_bytes=1 << 18)) for _ in range(5)]
        for i, client in enumerate(clients):  # the first holds up the others
            client.sendall(post("/predictions/napper", json.dumps({"sleep_s": 0 if i else 3}).encode()))
        senders = [threading.Thread(target=client.sendall, args=(big * 2,)) for client in clients]
        for sender in senders:
            sender.start()
        assert held.peak < 25
        assert is_served(server)
        with ThreadPoolExecutor(len(clients)) as pool:  # nothing is lost
            assert [*pool.map(num_answers, clients)] == [3] * len(clients)
        for sender in senders:
            sender.join()


def num_answers(client):
    """Read three answers."""
    received = b""
    while received.count(b"HTTP/1.1 200") < 3 and (data := client.recv(1 << 20)):
        received += data
    return received.count(b"HTTP/1.1 200")


def test_unread_grpc_streams_cost_little_and_leave_nothing(server, ports):
    held = Held(server)
    for _ in range(3):
        client = Client(*ports)
        try:
            calls = [client.inference.StreamPredictions(request("flood", STREAM)) for _ in range(12)]
            assert held.peak < 150
            assert is_served(server)
            for call in calls:
                call.cancel()
        finally:
            client.close()
        held.until_free()
    assert "Traceback" not in server.log


def test_a_grpc_client_that_does_not_read_gets_an_error(server, ports):
    client = Client(*ports)
    try:
        replies = client.inference.StreamPredictions(request("flood", STREAM))
        assert len(next(replies).prediction) == MB
        server.until(lambda: server.logged("did not read a message", level="WARNING"))
        code, text = refusal(lambda: [*replies])
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert text.startswith("The client stopped reading")
    finally:
        client.close()


def test_a_slow_grpc_reader_gets_every_byte(server, ports):
    client = Client(*ports)
    try:
        size = 0
        for reply in client.inference.StreamPredictions(request("flood", {"n": 60, "bytes": 200_000}), timeout=60):
            size += len(reply.prediction)
            time.sleep(0.02)
        assert size == 60 * 200_000
    finally:
        client.close()
