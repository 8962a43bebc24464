"""CPU time per request of placed workers, against local ones: echo of small and large bodies.

python benchmarks/serving/placed_workers.py [--rounds 5] [--seconds 2]

Both servers run at once and take turns, so that a busy machine harms both alike. The CPU time of server and worker is
read from /proc. Placed workers run on this machine too, and connect as from any other: TCP inside TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

from flambeau.testing.server import ModelServer

HANDLER = "def handle(data, context):\n    return [row.get('body') or row.get('data') for row in data or ()]\n"
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pids):
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


async def client(port, body, until, count):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    kind = "Content-Type: application/octet-stream"
    head = f"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    while time.monotonic() < until:
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        size = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        assert len(await reader.readexactly(size)) == len(body)
        count[0] += 1
    writer.close()


async def drive(port, body, connections, seconds):
    count = [0]
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(port, body, until, count) for _ in range(connections)))
    return count[0]


def measure(server, pids, body, connections, seconds):
    """(front, rest) microseconds of CPU time per request."""
    before = cpu_s([pids[0]]), cpu_s(pids[1:])
    count = asyncio.run(drive(server.port, body, connections, seconds))
    after = cpu_s([pids[0]]), cpu_s(pids[1:])
    return tuple((b - a) / count * 1e6 for a, b in zip(before, after, strict=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (folder / "echo.py").write_text(HANDLER)
    cluster = ("--cluster", "local=1", "--worker-address", "127.0.0.1:0")
    variants = {"local": (), "local tcp": ("--worker-transport", "tcp"), "placed": cluster}
    servers = {
        name: ModelServer(folder / f"{name}.log", str(folder / "echo.py"), *words) for name, words in variants.items()
    }
    results = {}
    try:
        for server in servers.values():
            server.wait_ready()
        for what, size, connections in (("100 B", 100, 32), ("1 MB", 1 << 20, 4)):
            for _ in range(arguments.rounds):
                for name, server in servers.items():
                    pids = [server.process.pid, server.describe("echo")["workers"][0]["pid"]]
                    front, rest = measure(server, pids, b"x" * size, connections, arguments.seconds)
                    results.setdefault(f"{what}, {name}", []).append((front + rest, front, rest))
    finally:
        for server in servers.values():
            server.stop()
    best = {name: [round(number) for number in min(rounds)] for name, rounds in results.items()}
    for name, (total, front, rest) in best.items():
        ratio = total / best[f"{name.partition(',')[0]}, local"][0]
        print(f"{name:20} {total:6} µs = {front} + {rest}   {ratio:.2f} of local")
    print(json.dumps(best))


if __name__ == "__main__":
    main()
