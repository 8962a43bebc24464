"""Connections that hang, break off, or come in thousands."""

from __future__ import annotations

import http.client
import itertools
import json
import resource
import socket
import struct
import time
from contextlib import ExitStack

from flambeau.config.server import Address, Tls
from scorecard.case import Case, NotHere, Stage
from scorecard.probes import LatencyProbe, MemoryProbe, OwnAnswersClient, num_descriptors, wait_for
from support.configured import trusting
from support.running import RunningServer, free_ports

IDLE = 10_000


def unfinished_handshakes(stage: Stage) -> None:
    try:
        from flambeau.frontend.tls import self_signed

        certificate, key = self_signed("localhost")
    except ImportError:
        raise NotHere("needs cryptography") from None
    files = [stage.folder / "certificate.pem", stage.folder / "key.pem"]
    for file, content in zip(files, (certificate, key), strict=True):
        file.write_bytes(content)
    [port] = free_ports(1)
    server = stage.configured(
        "echo.py",
        max_files=600,
        management=Address(port=port, is_tls=True),
        tls=Tls(certificate_file=files[0], private_key_file=files[1]),
    )
    before = num_descriptors(server.process.pid)
    with ExitStack() as stack, LatencyProbe(server) as probe:
        for number in range(stage.scale.of(700, 100)):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            if number % 2:
                client.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # the beginning of a ClientHello
        with OwnAnswersClient(server, connections=4, timeout_s=20) as others:
            began = time.monotonic()
            status = https_status(port, "/models")
            stage.at_most("answer on the port under attack after", time.monotonic() - began, 10, "s")
            time.sleep(1)
        stage.equal("status on the port under attack", status, 200)
    others.judge(stage, refusals=False)
    probe.judge(stage)
    gone_s = wait_for(lambda: num_descriptors(server.process.pid) <= before + 5, 20)
    stage.within("descriptors are back after", gone_s, 15)


def https_status(port: int, path: str) -> int | str:
    connection = http.client.HTTPSConnection("localhost", port, context=trusting(), timeout=20)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError as error:
        return f"{type(error).__name__}"
    finally:
        connection.close()


def bad_bytes_after_requests(stage: Stage) -> None:
    server = stage.serve("obedient.py")
    order = json.dumps({"do": "sleep", "s": 0.02}).encode()
    predict = b"POST /predictions/obedient HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    predict += b"Content-Length: %d\r\n\r\n" % len(order) + order
    plain = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    probe, describe, models = b"GET /livez" + plain, b"OPTIONS /" + plain, b"GET /models" + plain
    kinds = (
        (server.port, predict, predict),
        (server.port, predict, probe),  # the quick ones wait for the slow one, and are answered turn by turn
        (server.port, probe, probe),
        (server.port, describe, predict),
        (server.management_port, models, models),
    )
    endings = (b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n")
    wrong, num_tries = [], 0
    for (port, first, other), ending, is_later in itertools.product(kinds, endings, (False, True)):
        for count in (0, 2, 20, 90)[: stage.scale.of(4, 3)]:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(first + other * count + (b"" if is_later else ending))
                if is_later:
                    client.recv(1, socket.MSG_PEEK)  # the answers have begun
                    client.sendall(ending)
                statuses = statuses_until_closed(client)
            num_tries += 1
            owed = [200] * (1 + count)
            if statuses not in (owed, [*owed, 400]):
                wrong.append(f"{1 + count} requests, then {ending[:20]!r}: {len(statuses)} answers, {statuses[-3:]}")
    stage.note("connections", num_tries)
    stage.none("connections where bad bytes took the place of an answer", wrong)


def statuses_until_closed(client: socket.socket) -> list[int]:
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except OSError:
        pass
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def early_closes(stage: Stage) -> None:
    server = stage.serve("echo.py", "obedient.py")
    count = stage.scale.of(1500, 150)
    leave_early(server, count)  # the server keeps a few pieces of shared memory for large bodies
    before = settled_descriptors(server)
    leave_early(server, count)
    leave_early(server, count)
    wait_for(lambda: num_descriptors(server.process.pid) <= before, 20)
    stage.note("connections that closed early", 3 * count)
    stage.note("descriptors after a third of them", before)
    stage.at_most("more descriptors at the end", num_descriptors(server.process.pid) - before, 2)
    with OwnAnswersClient(server, connections=2) as client_after:
        time.sleep(0.5)
    client_after.judge(stage, refusals=False)


def leave_early(server: RunningServer, count: int) -> None:
    """Open connections, send a part of a request or several whole ones, and go: in order, or with a reset."""
    body = b"x" * 1_000_000
    head = b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    pieces = [b"", b"POST ", head, head + body[:300_000], head + body, (head + body) * 2]
    for number in range(count):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(pieces[number % len(pieces)])
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def settled_descriptors(server: RunningServer) -> int:
    """The number of descriptors when it has not changed for a while."""
    counts = [num_descriptors(server.process.pid)]
    while (len(counts) < 100 and len({*counts[-8:]}) > 1) or len(counts) < 8:
        time.sleep(0.1)
        counts.append(num_descriptors(server.process.pid))
    return counts[-1]


def idle_connections(stage: Stage) -> None:
    count = stage.scale.of(IDLE, 300)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count * 1.1 + 500:
        raise NotHere(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = stage.serve("echo.py")
    with MemoryProbe(server) as memory, ExitStack() as stack, LatencyProbe(server) as probe:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)))
        with OwnAnswersClient(server, connections=4) as others:
            time.sleep(2)
        num_closed = sum(is_closed(client) for client in clients)
        stage.note("idle connections", count)
        stage.equal("closed by the server", num_closed, 0)
        stage.note("memory for each", 1024 * (memory.peak.held - memory.before.held) / count, "KB")
    others.judge(stage, refusals=False)
    probe.judge(stage)
    wait_for(lambda: num_descriptors(server.process.pid) < 200, 20)
    stage.at_most("descriptors afterwards", num_descriptors(server.process.pid), 200)


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def more_connections_than_files(stage: Stage) -> None:
    server = stage.configured("echo.py", max_files=600)
    with ExitStack() as stack:
        for port in (server.port, server.management_port):
            for _ in range(700):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        with OwnAnswersClient(server, connections=4, timeout_s=20) as others:
            time.sleep(2)
            status = server.manage("GET", "/models").status
    stage.equal("management answers", status, 200)
    others.judge(stage, refusals=False)
    stage.at_least("warnings in the log", len(server.logged(level="WARNING")), 1)


def slow_heads(stage: Stage) -> None:
    server = stage.configured("echo.py", request_read_timeout_s=3, keep_alive_s=3)
    with ExitStack() as stack, LatencyProbe(server) as probe, OwnAnswersClient(server, connections=2) as others:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            for _ in range(stage.scale.of(400, 40))
        ]
        for client in clients:
            client.sendall(b"POST /predictions/echo HTTP/1.1\r\nX-Drip: ")
        closed_s = wait_for(lambda: drip(clients), 25)
    stage.within("all are closed after", closed_s, 15)
    others.judge(stage, refusals=False)
    probe.judge(stage)


def drip(clients: list[socket.socket]) -> bool:
    """Send a byte on each connection; whether all are closed."""
    num_open = 0
    for client in clients:
        try:
            client.setblocking(False)
            client.send(b"x")
            num_open += not is_closed(client)
        except OSError:
            continue
    time.sleep(0.3)
    return num_open == 0


CASES = (
    Case(
        name="700 TLS handshakes that never finish",
        group="clients",
        promise="They are counted and closed; every port keeps answering, also the one under attack.",
        run=unfinished_handshakes,
    ),
    Case(
        name="Bad bytes after pipelined requests",
        group="clients",
        promise="Requests that came before are answered; then the connection is closed.",
        run=bad_bytes_after_requests,
    ),
    Case(
        name="Clients that close early",
        group="clients",
        promise="No descriptor is left open.",
        run=early_closes,
    ),
    Case(
        name="10,000 idle connections",
        group="clients",
        promise="They stay open, and other clients are served, where the limit of open files allows it.",
        run=idle_connections,
    ),
    Case(
        name="More connections than open files",
        group="clients",
        promise="Clients who send requests are served on every port; the log has a warning.",
        run=more_connections_than_files,
    ),
    Case(
        name="Heads that arrive byte by byte",
        group="clients",
        promise="The connections are closed after the time limit; others are served.",
        run=slow_heads,
    ),
)
