"""Requests and starts that could hold the event loop: everyone else waits as long as /livez waits."""

from __future__ import annotations

import json
import socket
import time

from scorecard.case import Case, Stage
from scorecard.probes import LatencyProbe


def options_flood(stage: Stage) -> None:
    flood(stage, b"OPTIONS / HTTP/1.1\r\n\r\n", stage.scale.of(1000, 200))


def metrics_flood(stage: Stage) -> None:
    flood(stage, b"GET /metrics HTTP/1.1\r\n\r\n", stage.scale.of(8000, 800), port="metrics_port")


def flood(stage: Stage, request: bytes, count: int, port: str = "port") -> None:
    server = stage.serve("echo.py")
    request = request.replace(b"\r\n\r\n", b"\r\nHost: localhost\r\n\r\n")
    with LatencyProbe(server) as probe:
        began = time.monotonic()
        num_answers = pipelined_answers(getattr(server, port), request * count, count)
        seconds = time.monotonic() - began
        time.sleep(0.2)
    stage.note("pipelined requests", count)
    stage.equal("answers", num_answers, count)
    stage.note("all answered within", seconds, "s")
    probe.judge(stage)


def pipelined_answers(port: int, requests: bytes, count: int) -> int:
    """Send requests in one piece, read the answers and count them."""
    found = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(requests)
        tail = b""
        while found < count and (data := client.recv(1 << 20)):
            tail += data
            found += tail.count(b"HTTP/1.1 200")
            tail = tail[-11:]
    return found


def sixty_workers(stage: Stage) -> None:
    count = stage.scale.of(60, 6)
    server = stage.serve("echo.py")
    with LatencyProbe(server) as probe:
        began = time.monotonic()
        reply = server.manage(
            "PUT", f"/models/echo?min_worker={count}&max_worker={count}&synchronous=true", timeout=150
        )
        stage.note("all workers ready after", time.monotonic() - began, "s")
    stage.equal(f"status of the call for {count} workers", reply.status, 200)
    stage.equal("workers", len(server.worker_pids("echo")), count)
    probe.judge(stage)


def long_field_name(stage: Stage) -> None:
    server = stage.serve("echo.py")
    body = json.dumps({"model": "echo", "prompt": "x", "y" * 6_000_000: 1}).encode()
    headers = {"Content-Type": "application/json"}
    slowest_s, statuses = 0.0, set()
    with LatencyProbe(server) as probe:
        for _ in range(stage.scale.of(10, 2)):
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
                began = time.monotonic()
                reply = server.request("POST", path, body, headers)
                slowest_s = max(slowest_s, time.monotonic() - began)
                statuses.add(reply.status)
                assert len(reply.body) < 10_000, "the answer repeats the name"
    stage.none("answers other than 400 and 404", [status for status in statuses if status not in (400, 404)])
    stage.note("slowest refusal", 1000 * slowest_s, "ms")
    probe.judge(stage)


def printed_lines(stage: Stage) -> None:
    server = stage.serve("obedient.py", "--workers", "2")
    with LatencyProbe(server) as probe:
        order = {"do": "print", "n": stage.scale.of(300_000, 20_000), "line": "x" * 99}
        assert server.predict("obedient", order, timeout=80).status == 200
    probe.judge(stage)


LOOP = "/livez answers within 50 ms (p99); every request is answered."
CASES = (
    Case(name="1,000 pipelined OPTIONS", group="clients", promise=LOOP, run=options_flood),
    Case(name="8,000 pipelined requests for metrics", group="clients", promise=LOOP, run=metrics_flood),
    Case(name="Start of 60 workers", group="faults", promise=LOOP, run=sixty_workers, limit_s=180),
    Case(
        name="An unknown field with a name of 6 MB",
        group="clients",
        promise="It is refused with a short message; /livez answers within 50 ms (p99).",
        run=long_field_name,
        is_quick=True,
    ),
    Case(name="30 MB printed by a handler", group="faults", promise=LOOP, run=printed_lines),
)
