"""gRPC callers that do not play by the rules: the others keep their answers, and the server its memory."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flambeau.config.server import Address, GrpcConfig, KeysConfig
from support.configured import ConfiguredServer
from support.grpc_calls import Client, refusal
from support.running import HANDLERS, Load, free_ports

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and empty SETTINGS
ACKNOWLEDGED = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"


@contextmanager
def serving(folder, **settings):
    """A server with gRPC ports, and a client of it."""
    ports = free_ports(2)
    addresses = GrpcConfig(inference=Address(port=ports[0]), management=Address(port=ports[1]))
    with ConfiguredServer(folder, HANDLERS / "orders.py", HANDLERS / "echo.py", grpc=addresses, **settings) as server:
        client = Client(*ports)
        try:
            yield server, client, ports[0]
        finally:
            client.close()


def never():
    """The messages of a caller who sends none."""
    threading.Event().wait(120)
    yield b""


def test_who_has_no_key_is_refused_before_the_message_is_read(tmp_path):
    keys = KeysConfig(is_on=True, file=tmp_path / "keys.json")
    with serving(tmp_path, keys=keys) as (_, client, _):
        call = client.channel.stream_unary(PREDICTIONS)
        assert refusal(call, never(), timeout=60)[0] is StatusCode.PERMISSION_DENIED


def test_a_message_that_does_not_come_is_not_waited_for(tmp_path):
    with serving(tmp_path, request_read_timeout_s=1) as (_, client, _):
        for method in (PREDICTIONS, PREDICTIONS.replace("Predictions", "StreamPredictions")):
            code, text = refusal(client.channel.stream_unary(method), never(), timeout=60)
            assert code is StatusCode.DEADLINE_EXCEEDED
            assert "did not arrive within 1 s" in text
        assert refusal(client.channel.stream_unary(PREDICTIONS), iter([]), timeout=60)[0] is StatusCode.INVALID_ARGUMENT
        check = client.channel.stream_unary("/grpc.health.v1.Health/Check")
        assert "within 5 s" in refusal(check, never(), timeout=60)[1]
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        assert [*client.channel.stream_stream(reflection)(never(), timeout=60)] == []
        assert client.predict(order={"do": "answer", "value": "fine"}) == b"fine"


def test_calls_of_a_connection_are_bounded_and_idle_ones_are_closed(tmp_path):
    with serving(tmp_path, keep_alive_s=1) as (_, client, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(HELLO + ACKNOWLEDGED)
            said = b""
            while data := connection.recv(4096):  # until it is closed
                said += data
        assert settings_in(said)[3] == 1000
        assert client.predict(order={"do": "answer", "value": "fine"}) == b"fine"


def settings_in(frames):
    """What the first frame sets, by number."""
    size = int.from_bytes(frames[:3], "big")
    body = frames[9 : 9 + size]
    return {
        int.from_bytes(body[i : i + 2], "big"): int.from_bytes(body[i + 2 : i + 6], "big") for i in range(0, size, 6)
    }


def test_grpc_connections_leave_files_for_http(tmp_path):
    with serving(tmp_path, max_files=600) as (server, _, port), ExitStack() as stack:
        for _ in range(700):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.sendall(HELLO + ACKNOWLEDGED)
        server.until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) < 300)
        with Load(lambda: server.predict("echo", {}), threads=2) as load:
            server.until(lambda: len(load.replies) > 20)
        assert not load.errors
        assert {reply.status for reply in load.replies} == {200}


@pytest.mark.perf
def test_a_thousand_watchers_cost_next_to_nothing(tmp_path):
    with serving(tmp_path) as (server, client, _):
        watch = health_pb2_grpc.HealthStub(client.channel).Watch
        watching = [watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(900)]
        for one in watching:
            assert next(one).status == health_pb2.HealthCheckResponse.SERVING
        time.sleep(1)
        before = cpu_s(server)
        time.sleep(3)
        assert cpu_s(server) - before < 0.15  # a look of each, four times a second, took 0.3 and more
        for one in watching:
            one.cancel()
        assert client.predict(order={"do": "answer", "value": "fine"}) == b"fine"


def cpu_s(server):
    with open(f"/proc/{server.process.pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
