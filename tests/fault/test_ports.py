"""What many or foreign clients can do to the ports: storms of requests, silent TLS clients, too many connections."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import threading
from contextlib import ExitStack, suppress

import pytest

from flambeau.config.server import Address, KeysConfig
from support.configured import ConfiguredServer, trusting
from support.latency import LatencyProbe, storm
from support.running import HANDLERS, RunningServer, free_ports

ECHO, FAULTY = HANDLERS / "echo.py", HANDLERS / "faulty.py"
HOST = b"Host: localhost\r\n"
PING = b"GET /ping HTTP/1.1\r\n" + HOST + b"\r\n"
ENOUGH_S = 1.0  # a busy machine is no failure; the loop was once blocked for ten times as long


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ports")
    running = RunningServer(folder / "log", str(ECHO), str(FAULTY)).wait_ready()
    yield running
    assert running.stop() == 0


def dial(port):
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.settimeout(20)
    return client


def read_all(client):
    received = b""
    with suppress(ConnectionError):
        while data := client.recv(65536):
            received += data
    return received


def statuses(received):
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def slow(seconds):
    body = json.dumps({"do": "sleep", "s": seconds}).encode()
    return b"POST /predictions/faulty HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        HOST,
        len(body),
        body,
    )


def open_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


# ---- the event loop ----


@pytest.mark.parametrize(
    ("port", "line", "count", "connections"),
    [
        ("port", b"OPTIONS / HTTP/1.1\r\n", 500, 1),
        ("port", b"GET /ping HTTP/1.1\r\n", 500, 20),
        ("port", b"OPTIONS /predictions/echo HTTP/1.1\r\n", 500, 1),
        ("management_port", b"GET /api-description HTTP/1.1\r\n", 200, 5),
        ("metrics_port", b"GET /metrics HTTP/1.1\r\n", 3000, 1),
    ],
)
def test_pipelined_storms_leave_time_for_the_others(server, port, line, count, connections):
    with LatencyProbe(server.port) as own, LatencyProbe(server.management_port) as other:
        answered = storm(getattr(server, port), line + HOST + b"\r\n", count=count, connections=connections)
    assert answered == [count] * connections
    assert max(own.times) < ENOUGH_S
    assert max(other.times) < ENOUGH_S


def test_a_field_with_a_long_name_is_refused_at_once(server):
    body = json.dumps({"model": "echo", "messages": [], "x" * 6_000_000: 1}).encode()
    with LatencyProbe(server.management_port) as probe:
        reply = server.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert reply.status == 400
    assert len(reply.body) < 1000
    assert max(probe.times) < ENOUGH_S


# ---- order ----


@pytest.mark.parametrize("first", [PING, slow(0.3)])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_bad_bytes_come_after_the_answers_that_are_owed(server, first, count):
    with dial(server.port) as client:
        client.sendall(first + PING * count + b"rubbish\r\n\r\n")
        received = read_all(client)
    assert statuses(received) == [200] * (1 + count) + [400]
    assert b'"Invalid HTTP message."' in received


def test_requests_before_the_end_of_the_input_are_answered(server):
    with dial(server.port) as client:
        client.sendall(PING * 30)
        client.shutdown(socket.SHUT_WR)
        assert statuses(read_all(client)) == [200] * 30


def test_a_body_that_is_too_large_does_not_take_the_place_of_an_answer(server):
    with dial(server.port) as client:
        client.sendall(slow(0.3) + b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        assert statuses(read_all(client)) == [200, 413]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"GET / HTTP/1.1\r\nBad Name: x\r\n\r\n", "Invalid header token"),
        (b"GET / HTTP/3.0\r\n\r\n", "Invalid HTTP version"),
        (b"GET / HTTP/2.0\r\n\r\n", "HTTP version 2.0 is not supported; 1.0 and 1.1 are"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "There are two Host headers"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "Invalid character in chunk size"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, "the head of the request is too long"),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00", "This is TLS, and the port is not an https:// address"),
    ],
)
def test_malformed_requests_are_rejected_with_the_cause(server, message, cause):
    with dial(server.port) as client:
        client.sendall(message)
        reply = read_all(client)
    document = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert document == {
        "code": 400,
        "type": "BadRequestException",
        "message": "Invalid HTTP message.",
        "cause": [cause],
    }


# ---- connections ----


def test_early_closes_leave_no_descriptors(server):
    messages = [
        b"",
        b"POST / HT",
        b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 1000\r\n\r\nx",
        b"rubbish\r\n\r\n",
        slow(0.1),
        PING * 50 + slow(0.1) + PING * 50,
        b"GET /api-description HTTP/1.1\r\n\r\n" * 50,
    ]
    before = open_files(server)
    for message in messages:
        for resets in (False, True):
            for _ in range(5):
                client = dial(server.port)
                client.sendall(message)
                if resets:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
    server.until(lambda: open_files(server) <= before)


def test_when_all_connections_are_in_use_further_clients_are_rejected_and_other_ports_answer(tmp_path):
    with ConfiguredServer(tmp_path, FAULTY, max_files=300) as server, ExitStack() as stack:
        for _ in range(30):  # about 36 fit
            stack.enter_context(dial(server.port)).sendall(slow(2))
        server.until(lambda: queued(server) >= 25)
        refused = b""
        while not refused:
            client = stack.enter_context(dial(server.port))
            client.sendall(slow(2))
            client.settimeout(0.5)
            with suppress(TimeoutError):
                refused = client.recv(65536)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5\r\n" in refused
        assert b"limit of open files" in refused
        assert server.manage("GET", "/models").status == 200
        assert server.logged("too many connections", "ulimit -n", level="WARNING")


def queued(server):
    return server.describe("faulty")["jobQueueStatus"]["pendingRequests"]


def test_connections_of_one_address_can_be_limited(tmp_path):
    with ConfiguredServer(tmp_path, ECHO, max_connections_per_address=5) as server, ExitStack() as stack:
        clients = [stack.enter_context(dial(server.port)) for _ in range(5)]
        for client in clients:
            client.sendall(PING)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        with dial(server.management_port) as more:
            more.sendall(b"GET /models HTTP/1.1\r\n" + HOST + b"\r\n")
            refused = read_all(more)
        assert statuses(refused) == [503]
        assert b"max_connections_per_address" in refused
        clients[0].close()
        server.until(lambda: server.manage("GET", "/models").status == 200)
        clients[1].sendall(PING)
        assert clients[1].recv(65536).startswith(b"HTTP/1.1 200")


# ---- TLS ----


def tls_server(folder, *models, **settings):
    inference, management, metrics = (Address(port=port, is_tls=True) for port in free_ports(3))
    addresses = {"inference": inference, "management": management, "metrics": metrics}
    server = ConfiguredServer(folder, *models, **addresses, **settings)
    server.metrics_port = metrics.port
    server.until(lambda: tls_status(server.port, "/readyz") == 200)
    return server


def tls_status(port, path):
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusting(), timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def test_tls_clients_that_say_nothing_leave_room_for_the_others(tmp_path):
    server = tls_server(tmp_path, ECHO, max_files=400)
    try:
        with ExitStack() as stack:
            for port in (server.port, server.management_port, server.metrics_port):
                for _ in range(200):
                    stack.enter_context(dial(port))
            assert tls_status(server.port, "/ping") == 200
            assert tls_status(server.management_port, "/models") == 200
            assert tls_status(server.metrics_port, "/metrics") == 200
            assert open_files(server) < 300
            assert server.logged("too many connections", level="WARNING")
        server.until(lambda: open_files(server) < 50)
    finally:
        assert server.stop() == 0


def test_handshakes_that_fail_while_the_server_stops_cost_no_answers(tmp_path):
    server = tls_server(tmp_path, FAULTY)
    is_over = threading.Event()

    def rubbish():
        while not is_over.wait(0.005):
            with suppress(OSError), dial(server.port) as client:
                client.sendall(b"this is no TLS\r\n\r\n")

    threads = [threading.Thread(target=rubbish) for _ in range(4)]
    client = trusting().wrap_socket(dial(server.port))
    client.sendall(slow(0.1) + slow(2))
    try:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")  # the second has arrived too
        for thread in threads:
            thread.start()
        server.process.terminate()
        assert read_all(client).startswith(b"HTTP/1.1 200")
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log
    finally:
        is_over.set()
        client.close()
        for thread in threads:
            thread.join()
        server.process.kill()
        server.process.wait()


def test_tls_connections_of_one_address_can_be_limited(tmp_path):
    server = tls_server(tmp_path, ECHO, max_connections_per_address=5)
    try:
        with ExitStack() as stack:

            def is_refused_beside_one_more():  # a connection from before may still count, and end later
                stack.enter_context(dial(server.port))
                return tls_status(server.port, "/ping") is None

            server.until(is_refused_beside_one_more)
        server.until(lambda: tls_status(server.port, "/ping") == 200)
    finally:
        assert server.stop() == 0


# ---- web pages ----

EVIL = {"Host": "rebound.example.com"}


def test_foreign_names_and_pages_are_refused_without_keys(server):
    for port in (server.port, server.management_port, server.metrics_port):
        reply = server.request("GET", "/livez", headers={"Host": f"rebound.example.com:{port}"}, port=port)
        assert (reply.status, reply.json["type"]) == (403, "ForbiddenException")
        assert "allowed_hosts" in reply.json["message"]
    reply = server.manage("POST", "/models?url=x.mar", headers={"Origin": "https://evil.example"})
    assert (reply.status, "cors_allowed_origin" in reply.json["message"]) == (403, True)
    assert server.manage("POST", "/models?url=x.mar", headers={"Origin": "null"}).status == 403
    large = server.request("POST", "/predictions/echo", b"x" * 300_000, {"Origin": "https://evil.example"})
    assert large.status == 403
    openai = server.request("POST", "/v1/completions", b"{}", EVIL)
    assert (openai.status, openai.json["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost"},
        {"Host": "10.1.2.3:8080"},  # a probe of Kubernetes
        {"Host": "[::1]:8080"},
        {"Host": socket.gethostname()},
        {"Host": "model-server:8080"},  # a service of a compose file
        {"Host": "localhost:1", "Origin": "http://localhost:3000"},
    ],
)
def test_ordinary_names_are_accepted(server, headers):
    assert server.request("GET", "/ping", headers=headers).status == 200


def test_allowed_names_and_origins_are_accepted(tmp_path):
    cors = (("Access-Control-Allow-Origin", "https://app.example.org"),)
    with ConfiguredServer(tmp_path, ECHO, allowed_hosts=("*.example.com",), cors=cors) as server:
        assert server.request("GET", "/ping", headers=EVIL).status == 200
        assert server.request("GET", "/ping", headers={"Host": "other.org"}).status == 403
        assert server.request("OPTIONS", "/ping", headers={"Origin": "https://app.example.org"}).status == 200
        assert server.request("OPTIONS", "/ping", headers={"Origin": "https://example.org"}).status == 403


def test_a_key_is_enough(tmp_path):
    with ConfiguredServer(tmp_path, ECHO, keys=KeysConfig(is_on=True, ping_needs_key=False)) as server:
        assert server.request("GET", "/ping", headers=EVIL).status == 200
        assert server.request("GET", "/metrics", headers=EVIL, port=server.metrics_port).status == 403
