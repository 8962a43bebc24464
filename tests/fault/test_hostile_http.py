"""Clients that do not play by the rules: the others keep their answers, and the server its memory."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.configured import ConfiguredServer
from support.running import HANDLERS, Load, RunningServer

ECHO = HANDLERS / "echo.py"
POST = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = RunningServer(tmp_path_factory.mktemp("hostile") / "log", str(ECHO)).wait_ready()
    yield running
    assert running.stop() == 0


def dial(server, port=None):
    client = socket.create_connection(("127.0.0.1", port or server.port), timeout=60)
    client.settimeout(20)
    return client


def read_all(client):
    """What the server says until it closes, or falls silent."""
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except (TimeoutError, ConnectionError):
        pass
    return received


def statuses(received):
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def answers(server):
    return server.predict("echo", {"a": 1}).status == 200


def resident_mb(server, field="VmRSS"):
    """Resident memory now, or at its peak (VmHWM)."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) >> 10  # the file has kB


def test_random_bytes_on_every_port(server):
    dice = random.Random(0)
    ports = (server.port, server.management_port, server.metrics_port)
    for i in range(90):
        with dial(server, ports[i % 3]) as client:
            client.sendall(dice.randbytes(dice.randrange(1, 4000)) + b"\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert statuses(read_all(client)) in ([], [400])
    assert answers(server)


def test_requests_with_random_faults(server):
    dice = random.Random(1)
    good = POST + b"Content-Type: application/json\r\nContent-Length: 8\r\n\r\n[1, 2.5]"
    for _ in range(150):
        broken = bytearray(good)
        for _ in range(dice.randrange(1, 6)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        with dial(server) as client:
            client.sendall(broken)
            client.shutdown(socket.SHUT_WR)
            assert all(status < 500 for status in statuses(read_all(client)))
    assert answers(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 40_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"y" * 200_000 + b": z\r\n\r\n",
        b"A" * 200_000,
        b"GET /?" + b"q=1&" * 50_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_oversize_heads_are_bounded(server, head):
    with dial(server) as client:
        try:
            client.sendall(head)
            client.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass
        assert statuses(read_all(client)) in ([400], [404], [405], [])
    assert answers(server)


def test_head_without_end_is_refused_before_it_fills_the_memory(server):
    before = resident_mb(server)
    with dial(server) as client:
        try:
            client.sendall(b"GET / HTTP/1.1\r\n")
            for i in range(20_000):
                client.sendall(b"header-%d: %b\r\n" % (i, b"x" * 1000))
        except ConnectionError:
            pass
        assert statuses(read_all(client)) in ([400], [])
    assert resident_mb(server) - before < 30
    assert answers(server)


@pytest.mark.parametrize(
    "message",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /ping HTTP/1.1\r\n\r\n",
        b"Content-Length: +5\r\n\r\nhello",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 99999999999999999999999\r\n\r\n",
        b"Content-Length: 5, 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked, identity\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n5;" + b"x" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
        b" Folded: line\r\n\r\n",
        b"Bad\x00Name: x\r\n\r\n",
        b"NoColon\r\n\r\n",
        b"x: y\nContent-Length: 3\n\nabc",
        b"Expect: 100-continue\r\nContent-Length: abc\r\n\r\n",
    ],
)
def test_framing_that_could_smuggle_a_request_gets_one_answer_at_most(server, message):
    with dial(server) as client:
        try:
            client.sendall(POST + message)
            client.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass
        received = read_all(client)
    assert len([status for status in statuses(received) if status != 100]) <= 1
    assert b"Healthy" not in received
    assert all(status < 500 for status in statuses(received))
    assert answers(server)


def test_chunked_body_never_grows_beyond_the_limit(start):
    server = start("echo.py", "--max-request-size", "100000").wait_ready()
    before = resident_mb(server)
    with dial(server) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(400):
                client.sendall(chunk)
        except ConnectionError:
            pass
        assert statuses(read_all(client)) in ([413], [])
    assert resident_mb(server) - before < 30
    assert answers(server)


def test_slow_clients_cost_the_others_nothing_and_are_shown_out(tmp_path):
    with ConfiguredServer(tmp_path, ECHO, request_read_timeout_s=2, keep_alive_s=2) as server, ExitStack() as stack:
        dripping = [stack.enter_context(dial(server)) for _ in range(50)]
        for client in dripping:
            client.sendall(b"POST /predictions/echo HTTP/1.1\r\nX-Drip: ")
        without_body = [stack.enter_context(dial(server)) for _ in range(50)]
        for client in without_body:
            client.sendall(POST + b"Content-Length: 1000000\r\n\r\nonly this much")
        silent = [stack.enter_context(dial(server)) for _ in range(50)]
        with Load(lambda: server.predict("echo", {}), threads=2) as load:
            deadline = time.monotonic() + 40
            waiting = [*dripping]
            while waiting and time.monotonic() < deadline:  # a byte now and then does not help
                waiting = [client for client in waiting if not is_closed(client, b"x")]
                time.sleep(0.2)
        assert not waiting
        assert not load.errors
        assert {reply.status for reply in load.replies} == {200}
        for client in (*without_body, *silent):
            client.settimeout(20)
            assert client.recv(1) == b""


def is_closed(client, byte):
    try:
        client.setblocking(False)
        client.send(byte)
        return client.recv(1000) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.timeout(120)
def test_connections_that_are_opened_and_left(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 10_000), hard))
    try:
        count = min(2_000, min(hard, 10_000) - 500)
        before = resident_mb(server)
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(dial(server))
            assert answers(server)
            assert resident_mb(server) - before < 100
            assert server.manage("GET", "/models").status == 200
        server.until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) < 200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answers(server)


def test_more_connections_than_files_leave_room_for_clients_who_ask(tmp_path):
    with ConfiguredServer(tmp_path, ECHO, max_files=600) as server, ExitStack() as stack:
        for port in (server.port, server.management_port):
            for _ in range(700):
                stack.enter_context(dial(server, port))
        with Load(lambda: server.predict("echo", {}), threads=2) as load:
            assert server.manage("GET", "/models").status == 200
            server.until(lambda: len(load.replies) > 20)
        assert not load.errors
        assert {reply.status for reply in load.replies} == {200}
        assert server.logged(level="WARNING")


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data; boundary=b", "multipart/form-data", "text/plain"]
)
def test_bad_bodies_are_never_server_errors(server, kind):
    bodies = [
        b"",
        b"{" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"\xff\xfe" * 1000,
        b"--b\r\n" * 5000,
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n',
        b"1" * 6000,
        b'"\\ud800"',
        b"NaN",
    ]
    for body in bodies:
        for path in ("/predictions/echo", "/invocations", "/echo/predict?a=%ff&a", "/v1/models/echo:predict"):
            reply = server.request("POST", path, body, {"Content-Type": kind})
            assert reply.status in (200, 400), (path, body[:40], reply.body[:300])
        reply = server.request("POST", "/v2/models/echo/infer", body, {"Content-Type": kind})
        assert reply.status == 400
        reply = server.manage("POST", "/models", body, headers={"Content-Type": kind})
        assert reply.status in (400, 404, 500)


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/%",
        "/%zz",
        "/%00",
        "/..%2f..%2fetc%2fpasswd",
        "/models/%2e%2e",
        "/predictions/" + "a" * 5000,
        "/\x7f",
        "/é",
        "*",
    ],
)
def test_odd_paths(server, path):
    for port in (server.port, server.management_port, server.metrics_port):
        with dial(server, port) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
            allowed = (200, 405) if path == "//" else (400, 404, 405)  # the root; the metrics port has only OPTIONS
            assert statuses(read_all(client))[0] in allowed


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def answer_to_endless(server, message, piece):
    """What a client is told after two megabytes of a message that goes on."""
    with dial(server) as client:
        client.settimeout(5)
        try:
            client.sendall(message)
            for _ in range(1 + (2 << 20) // len(piece)):
                client.sendall(piece)
        except (TimeoutError, ConnectionError):
            pass
        return statuses(read_all(client))


@pytest.mark.parametrize(
    "message",
    [
        CHUNKED + b"0\r\nX: ",
        CHUNKED + b"0\r\n",
        CHUNKED + b"1;",
        CHUNKED + b"1\r\na\r\n0\r\nX: ",
        CHUNKED + b"10000\r\n" + b"x" * 65536 + b"\r\n0\r\nX: ",
        POST + b"X: ",
    ],
)
def test_what_is_not_body_does_not_grow_without_end(server, message):
    piece = b"x: y\r\n" * 10_000 if message.endswith(b"0\r\n") else b"a" * 65536
    assert answer_to_endless(server, message, piece) == [400]
    assert answers(server)


def test_extensions_of_chunks_are_bounded_by_the_body_they_carry(server):
    assert answer_to_endless(server, CHUNKED, b"1;" + b"x" * 100_000 + b"\r\na\r\n") == [400]
    assert answers(server)


def test_small_chunks_cost_about_their_size(server):
    before = resident_mb(server)
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak is counted from here on
    with dial(server) as client:
        client.sendall(CHUNKED)
        for _ in range(20):
            client.sendall(b"2\r\nab\r\n" * 100_000)
        client.sendall(b"0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
    assert resident_mb(server, "VmHWM") - before < 40  # 4 MB of body
    assert answers(server)


def test_pipelined_requests_for_another_protocol_are_ordinary_requests(server):
    wish = b"GET /livez HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    with dial(server) as client:
        client.sendall(wish * 3)
        client.shutdown(socket.SHUT_WR)
        assert statuses(read_all(client)) in ([200] * 3, [])
    with dial(server) as client:
        client.sendall(wish * 4400)
        received = b""
        while len(statuses(received)) < 4400:
            received += client.recv(1 << 20)
    assert "RecursionError" not in server.log
    assert answers(server)


def test_pipelined_requests_of_any_total_are_answered(server):
    one = POST + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000
    with dial(server) as client:
        client.sendall(one * 150)
        client.settimeout(10)
        received = b""
        while len(statuses(received)) < 150:
            received += client.recv(1 << 20)
        assert statuses(received) == [200] * 150


def test_slow_large_bodies_leave_files_for_the_others(tmp_path):
    with ConfiguredServer(tmp_path, ECHO, max_files=600) as server, ExitStack() as stack:
        for port in (server.port, server.management_port, server.metrics_port):
            for _ in range(150):
                client = stack.enter_context(dial(server, port))
                client.sendall(POST + b"Content-Length: 6500000\r\n\r\nx")
        server.until(lambda: answers(server))
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 560
        assert server.manage("GET", "/models").status == 200
        big = server.request("POST", "/predictions/echo", b"x" * 1_000_000)
        assert big.status == 200


def test_bodies_that_do_not_arrive_are_bounded_together(tmp_path):
    settings = {"max_request_bytes": 400 << 20}
    with ConfiguredServer(tmp_path, ECHO, **settings) as server, ExitStack() as stack:
        slow = []
        for _ in range(8):  # 3.2 GB are announced where 1.6 GB may be
            client = stack.enter_context(dial(server))
            client.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 400000000\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 100")  # the server has begun to receive its body
            client.sendall(b"x")
            slow.append(client)
        server.until(lambda: server.logged(level="WARNING"))
        assert is_closed(slow[0], b"x")
        assert not is_closed(slow[-1], b"x")
        assert answers(server)


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    other = tmp_path_factory.mktemp("two") / "other.py"
    other.write_bytes(ECHO.read_bytes())
    running = RunningServer(other.parent / "log", str(ECHO), str(other)).wait_ready()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"a&" * 3_000_000, "application/x-www-form-urlencoded"),
        (b"a=1&" * 1_500_000, "application/x-www-form-urlencoded"),
        (PART * 120_000 + b"--b--\r\n", FORM["Content-Type"]),
        (PART.replace(b'"a"', b'"a"; filename="f"') * 60_000 + b"--b--\r\n", FORM["Content-Type"]),
        (b"x", "multipart/form-data; boundary=" + "b" * 50_000),
    ],
)
def test_forms_without_end_do_not_delay_others(two_models, body, kind):
    began = time.monotonic()
    with Load(lambda: timed_look(two_models), threads=1) as load:
        reply = two_models.request("POST", "/invocations", body, {"Content-Type": kind}, timeout=60)
    took_s = time.monotonic() - began
    assert reply.status == 400, reply.body[:300]
    assert not load.errors
    assert max(load.replies) < 1 + took_s / 2  # on a slow machine everything takes its time


def timed_look(server) -> float:
    """How many seconds a request without work takes."""
    began = time.monotonic()
    assert server.request("GET", "/livez").status == 200
    return time.monotonic() - began


def test_form_still_names_its_model(two_models):
    named = PART.replace(b'"a"', b'"model_name"').replace(b"1\r\n", b"other\r\n")
    reply = two_models.request("POST", "/invocations", PART * 500 + named + PART + b"--b--\r\n", FORM)
    assert reply.status == 200
    fields = {"Content-Type": "application/x-www-form-urlencoded"}
    assert two_models.request("POST", "/invocations", b"a=1&model_name=echo", fields).status == 200


@pytest.mark.parametrize("key", ["max_batch_delay", "response_timeout", "startup_timeout", "batch_size"])
@pytest.mark.parametrize("digits", [10, 19, 400, 4000, 5000])
def test_huge_numbers_are_no_server_errors(server, key, digits):
    number = "9" * digits
    reply = server.manage("POST", f"/models?url=nothing.mar&{key}={number}")
    assert reply.status == 400
    body = f'{{"url": "nothing.mar", "{key}": {number}}}'.encode()
    assert server.manage("POST", "/models", body, headers={"Content-Type": "application/json"}).status == 400


def test_more_workers_than_any_machine_holds_are_refused(server):
    assert server.manage("PUT", "/models/echo?min_worker=2000000000&max_worker=2000000000").status == 400
    assert server.manage("POST", "/models?url=nothing.mar&initial_workers=2000000000").status == 400
    assert answers(server)


def test_parameters_of_a_call_are_bounded(server):
    body = b'{"url": "nothing.mar", "x": "' + b"y" * 70_000 + b'"}'
    reply = server.manage("POST", "/models", body, headers={"Content-Type": "application/json"})
    assert (reply.status, "parameters may have 65536" in reply.json["message"]) == (400, True)


def test_names_from_outside_forge_no_lines(server):
    forged = "x%0a2026-01-01T00:00:00Z%20WARNING%20forged"
    assert server.manage("POST", f"/models?url=http://h/{forged}").status in (400, 404)
    assert server.manage("POST", f"/models?url={ECHO}&model_name={forged}").status in (400, 404)
    assert server.request("GET", f"/predictions/{forged}").status == 404
    assert server.manage("DELETE", f"/models/{forged}").status == 404
    assert not any(line.startswith("2026-01-01") for line in server.log.splitlines())
