"""Storms of pipelined requests, and a probe that measures how long /livez takes meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
PAUSE_S = 0.002


class LatencyProbe:
    """Sends /livez over a connection of its own until it ends; `times` are the seconds of each answer."""

    def __init__(self, port: int) -> None:
        self.times: list[float] = []
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> LatencyProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def percentile(self, percent: float) -> float:
        return sorted(self.times)[int(len(self.times) * percent / 100)]

    def _run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as client:
            client.settimeout(120)
            while not self._stop.wait(PAUSE_S):
                began = time.monotonic()
                client.sendall(PROBE)
                received = b""
                while b"alive" not in received:
                    data = client.recv(65536)
                    assert data, "the server closed the connection of the probe"
                    received += data
                self.times.append(time.monotonic() - began)


def pipeline(port: int, requests: bytes, count: int) -> int:
    """Send requests at once; returns how many answers came before the server closed, or `count`."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(120)
        sender = threading.Thread(target=client.sendall, args=(requests,))
        sender.start()
        num_answers, rest = 0, b""
        while num_answers < count:
            data = client.recv(1 << 20)
            if not data:
                break
            text = rest + data
            num_answers += text.count(b"HTTP/1.1 ")
            rest = text[-8:]  # one byte less than what is counted
        sender.join()
    return num_answers


def storm(port: int, request: bytes, *, count: int, connections: int = 1) -> list[int]:
    """Pipeline `count` requests on each of some connections; returns how many were answered on each."""
    with ThreadPoolExecutor(connections) as pool:
        return [*pool.map(lambda _: pipeline(port, request * count, count), range(connections))]
