"""Clients who do not read, or send much and wait: what the server holds for them is bounded, and given back."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any

from flambeau.config.server import Address, GrpcConfig
from scorecard.case import Case, NotHere, Stage
from scorecard.probes import LatencyProbe, Memory, MemoryProbe, OwnAnswersClient
from support.configured import ConfiguredServer
from support.running import RunningServer, free_ports

PEAK_MB = 300  # the budget of a port, 256 MiB, and what it costs to hold it
PROMISE = f"At most {PEAK_MB} MB are held for them; memory is back within 10 % afterwards; other clients are served."


def unread_http_streams(stage: Stage) -> None:
    count = stage.scale.of(24, 4)
    server = stage.serve("obedient.py", "echo.py", "--workers", str(min(count, 6)))
    warm_up(server)
    order = json.dumps({"do": "stream", "n": 20_000, "bytes": 65536}).encode()
    head = b"POST /predictions/obedient HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
        with ExitStack() as stack:
            for _ in range(count):
                client = stack.enter_context(unreading_socket(server.port))
                client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(order) + order)
            time.sleep(stage.scale.of(6, 1))
            others_are_served(stage, server)
        memory.judge(stage, peak_mb=PEAK_MB)
    probe.judge(stage)


def unread_grpc_streams(stage: Stage) -> None:
    server, port = serve_grpc(stage, workers=stage.scale.of(4, 2))
    warm_up(server)
    with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
        clients = open_grpc_streams(port, stage.scale.of(20, 4))
        time.sleep(stage.scale.of(6, 1))
        others_are_served(stage, server)
        for channel, stream in clients:
            stream.cancel()
            channel.close()
        memory.judge(stage, peak_mb=PEAK_MB)
    probe.judge(stage)


def cancelled_grpc_streams(stage: Stage) -> None:
    server, port = serve_grpc(stage, workers=4)
    warm_up(server)
    one_round(server, port, stage.scale.of(20, 4))  # what is allocated once and kept is not a leak
    with MemoryProbe(server) as memory:
        for number in range(3):
            one_round(server, port, stage.scale.of(20, 4))
            stage.note(f"memory after round {number + 1} (RSS)", Memory.of(server.process.pid).rss, "MB")
        memory.judge(stage, peak_mb=PEAK_MB)
    stage.equal("tracebacks for callers that have gone", server.log.count("Traceback"), 0)


def one_round(server: RunningServer, port: int, count: int) -> None:
    for channel, stream in open_grpc_streams(port, count):
        next(stream)
        time.sleep(0.05)
        stream.cancel()
        channel.close()
    server.until(lambda: server.describe("obedient")["jobQueueStatus"]["pendingRequests"] == 0)
    time.sleep(1)


def serve_grpc(stage: Stage, *, workers: int) -> tuple[ConfiguredServer, int]:
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise NotHere("needs grpcio") from None
    ports = free_ports(2)
    addresses = GrpcConfig(inference=Address(port=ports[0]), management=Address(port=ports[1]))
    server = stage.configured("obedient.py", "echo.py", grpc=addresses)
    assert server.manage("PUT", f"/models/obedient?min_worker={workers}&synchronous=true").status == 200
    return server, ports[0]


def open_grpc_streams(port: int, count: int) -> list[tuple[Any, Any]]:
    """Streams of which the client reads nothing but what gRPC buffers itself; each on a connection of its own."""
    import grpc

    from support.grpc_calls import request, stubs

    streams: list[tuple[Any, Any]] = []
    for number in range(count):
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.channel_number", number)])
        service = stubs().inference_pb2_grpc.InferenceAPIsServiceStub(channel)
        call = service.StreamPredictions(request("obedient", {"do": "stream", "n": 20_000, "bytes": 65536}))
        streams.append((channel, call))
    return streams


def unread_pipelined_answers(stage: Stage) -> None:
    server = stage.serve("echo.py")
    warm_up(server)
    request = b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
        with ExitStack() as stack:
            for port in (server.port, server.management_port):
                for _ in range(stage.scale.of(20, 2)):
                    client = stack.enter_context(unreading_socket(port))
                    client.sendall(request * 2000)
            time.sleep(stage.scale.of(5, 1))
            others_are_served(stage, server)
        memory.judge(stage, peak_mb=PEAK_MB)
    probe.judge(stage)


def waiting_bodies(stage: Stage) -> None:
    server = stage.serve("obedient.py", "echo.py")
    warm_up(server)
    slow = json.dumps({"do": "sleep", "s": 8}).encode()
    kind = b"Host: localhost\r\nContent-Type: application/json\r\n"
    head = b"POST /predictions/obedient HTTP/1.1\r\n" + kind
    body = b'"' + b"x" * 6_000_000 + b'"'
    large = b"POST /predictions/echo HTTP/1.1\r\n" + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
        with ExitStack() as stack:
            for _ in range(stage.scale.of(24, 4)):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
                client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(slow) + slow)
                send_what_goes(client, large * 10)  # bodies that wait behind the slow answer
            others_are_served(stage, server)
        memory.judge(stage, peak_mb=PEAK_MB)
    probe.judge(stage)


def send_what_goes(client: socket.socket, data: bytes) -> None:
    """Send until the server stops reading."""
    client.settimeout(0.25)
    try:
        client.sendall(data)
    except OSError:
        pass


def unreading_socket(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.settimeout(60)
    return client


def others_are_served(stage: Stage, server: RunningServer) -> None:
    with OwnAnswersClient(server, connections=2, timeout_s=20) as client:
        time.sleep(1)
    client.judge(stage, refusals=False)
    stage.at_least("answers to others in a second", client.tally.answered, 10)


def warm_up(server: RunningServer) -> None:
    """Ordinary traffic first, so that what is allocated once does not count as growth."""
    with OwnAnswersClient(server, connections=8, large_every=5):
        time.sleep(1)
    server.request("OPTIONS", "/")


def growth_over_requests(stage: Stage) -> None:
    server = stage.serve("echo.py")
    with OwnAnswersClient(server, connections=8, large_every=0):
        time.sleep(stage.scale.of(5, 1))
    with MemoryProbe(server) as memory:
        with OwnAnswersClient(server, connections=8, large_every=0) as client:
            time.sleep(stage.scale.of(30, 2))
        client.tally.times.clear()
        memory.judge(stage, peak_mb=None)
    client.judge(stage, refusals=False)


CASES = (
    Case(name="24 HTTP streams that nobody reads", group="clients", promise=PROMISE, run=unread_http_streams),
    Case(name="20 gRPC streams that nobody reads", group="clients", promise=PROMISE, run=unread_grpc_streams),
    Case(
        name="Cancelled gRPC streams, three rounds",
        group="clients",
        promise="Unread parts are freed: memory is back within 10 %. No traceback for a caller that has gone.",
        run=cancelled_grpc_streams,
    ),
    Case(name="Pipelined answers that nobody reads", group="clients", promise=PROMISE, run=unread_pipelined_answers),
    Case(name="Complete bodies behind a slow request", group="clients", promise=PROMISE, run=waiting_bodies),
    Case(
        name="Memory over many requests",
        group="load",
        promise="Ordinary requests leave nothing behind: memory is back within 10 %.",
        run=growth_over_requests,
    ),
)
