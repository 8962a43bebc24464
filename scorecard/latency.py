"""Asks /livez until its input ends, then prints the times; a process of its own, which shares no lock with a load."""

from __future__ import annotations

import json
import select
import socket
import sys
import time

INTERVAL_S = 0.01
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT_S = 60.0


def ask(port: int) -> tuple[list[float], list[float], int]:
    """Milliseconds of each answer, of each late wake-up of this process, and the number of failures."""
    times: list[float] = []
    delays: list[float] = []
    num_failures = 0
    client: socket.socket | None = None
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        began = time.perf_counter()
        delays.append(1000 * (began - due))
        try:
            client = client or socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
            client.sendall(REQUEST)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += (piece := client.recv(4096))
                if not piece:
                    raise ConnectionError("closed")
            if not answer.startswith(b"HTTP/1.1 200"):
                num_failures += 1
        except OSError:
            num_failures += 1
            if client is not None:
                client.close()
            client = None
        times.append(1000 * (time.perf_counter() - began))
        due = max(due + INTERVAL_S, time.perf_counter())
    return times, delays, num_failures


if __name__ == "__main__":
    print("ready", flush=True)
    print(json.dumps(ask(int(sys.argv[1]))))
