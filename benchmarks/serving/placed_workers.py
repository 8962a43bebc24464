"""CPU time per request of placed workers, against local ones: echo of small and large bodies.

python benchmarks/serving/placed_workers.py [--rounds 5] [--seconds 2] [--save]

The servers run at once and take turns, so that a busy machine harms all alike. The CPU time of all their processes
(server, worker, log process; placer and agent too) is read from /proc. Placed workers run on this machine: "placed" by
its Unix socket, "placed TLS" as from any other machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from machine import describe

from flambeau.serving.workers.host_resources import descendants
from flambeau.testing.server import ModelServer

HANDLER = "def handle(data, context):\n    return [row.get('body') or row.get('data') for row in data or ()]\n"
TICKS = os.sysconf("SC_CLK_TCK")
# The same server without its Unix socket for workers of this machine.
TLS_ONLY = """#!/bin/sh
shift 2
exec {python} -c "
import sys
from flambeau.serving.cluster.worker_port import WorkerPort
from flambeau.cli.main import main
WorkerPort.local_name = property(lambda port: '', lambda port, name: None)
main()" "$@"
"""


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


def measure(server, body, connections, seconds):
    """(server, others) microseconds of CPU time per request."""
    front = server.process.pid
    others = [pid for pid in descendants(front) if pid != front]
    before = cpu_s([front]), cpu_s(others)
    count = asyncio.run(drive(server.port, body, connections, seconds))
    after = cpu_s([front]), cpu_s(others)
    return tuple((b - a) / count * 1e6 for a, b in zip(before, after, strict=True))


def start_servers(folder):
    (folder / "echo.py").write_text(HANDLER)
    wrapper = folder / "python"
    wrapper.write_text(TLS_ONLY.format(python=sys.executable))
    wrapper.chmod(0o755)
    cluster = ("--cluster", "local=1", "--worker-address", "127.0.0.1:0")

    class TlsServer(ModelServer):
        python = str(wrapper)

    variants = {
        "local": (ModelServer, ()),
        "local tcp": (ModelServer, ("--worker-transport", "tcp")),
        "placed": (ModelServer, cluster),
        "placed TLS": (TlsServer, cluster),
    }
    return {
        name: kind(folder / f"{name}.log", str(folder / "echo.py"), *words) for name, (kind, words) in variants.items()
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--save", action="store_true", help="write a dated result")
    arguments = parser.parse_args()
    began = datetime.now(UTC)
    servers = start_servers(Path(tempfile.mkdtemp()))
    results = {}
    try:
        for server in servers.values():
            server.wait_ready()
        for what, size, connections in (("100 B", 100, 32), ("1 MB", 1 << 20, 4)):
            for number in range(arguments.rounds + 1):
                for name, server in servers.items():
                    found = measure(server, b"x" * size, connections, arguments.seconds)
                    if number:  # the first round warms up
                        results.setdefault(f"{what}, {name}", []).append((sum(found), *found))
    finally:
        for server in servers.values():
            server.stop()
    show(results)
    if arguments.save:
        save(results, began)


def save(results, began):
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    document = {
        "date": began.isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "machine": describe(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "commit": commit.stdout.strip(),
        "microseconds": {
            name: [dict(zip(("all", "server", "others"), map(round, one), strict=True)) for one in rounds]
            for name, rounds in results.items()
        },
    }
    file = Path(__file__).parents[1] / "results" / f"{began:%Y-%m-%d-%H%M}-placed-workers.json"
    file.write_text(json.dumps(document, indent=1) + "\n")


def show(results):
    """The lowest of the rounds, and the median of the ratios to the local worker of the same round."""
    best = {name: [round(number) for number in min(rounds)] for name, rounds in results.items()}
    for name, (total, front, rest) in best.items():
        baseline = f"{name.partition(',')[0]}, local"
        pairs = zip(results[name], results[baseline], strict=True)
        ratio = statistics.median(one[0] / other[0] for one, other in pairs)
        lowest = total / best[baseline][0]
        print(f"{name:20} {total:6} µs = {front} + {rest}   {lowest:.2f} of local, median of rounds {ratio:.2f}")


if __name__ == "__main__":
    main()
