"""What one small request costs the server and the worker, each in a process of its own, without the other.

    python benchmarks/serving/request_path.py [--rounds 200] [--instructions] [--source OTHER/src]

server: from the bytes that a client sent to the bytes for its socket, with a worker that answers at once.
worker: from the server's frame to the frame with the reply, through a real socket pair.

Prints microseconds of CPU time, which a busy machine changes by a fifth. `--instructions` counts what the processor
executes instead, to half a percent, in about two minutes; it needs valgrind.
`--source` measures another version, a git worktree for example.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

BODY = b'{"id": 7, "text": "a small request"}'
HEADERS = (("host", "localhost:8080"), ("accept", "*/*"), ("content-type", "application/json"))
ANSWER = b'{\n  "id": 7\n}'
HANDLER = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [{"id": row["body"]["id"]} for row in data]
"""
WARM_UP, PER_ROUND = 64, 64
COUNTED = (192, 1152)  # requests of two runs, whose difference leaves the start out
SUBJECTS = ("server, 1 client", "server, 16 clients", "worker")

Run = Callable[[int], None]  # so many requests


class Transport:
    """Takes everything at once."""

    def __init__(self) -> None:
        self.last = b""

    def write(self, data: bytes) -> None:
        self.last = data

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None


def report(run: Run, rounds: int) -> NoReturn:
    """Print the least and the median CPU time of a request in µs; leave without an end that would count as well."""
    run(WARM_UP)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(rounds):
        began = time.process_time_ns()
        run(PER_ROUND)
        times.append((time.process_time_ns() - began) / PER_ROUND / 1000)
    print(f"{min(times):8.2f} {statistics.median(times):8.2f}", flush=True)
    os._exit(0)


async def measure_server(num_clients: int, rounds: int) -> None:
    from flambeau.config.model import ModelConfig
    from flambeau.config.server import MetricsConfig, ServerConfig
    from flambeau.frontend.authorization import HostCheck
    from flambeau.frontend.http.connection import HttpConnection
    from flambeau.frontend.http.exchange import common_headers
    from flambeau.frontend.http.inference import InferenceApi
    from flambeau.frontend.http.listener import ConnectionRoom, HttpLimits, Listener
    from flambeau.frontend.http.router import Router
    from flambeau.serving.server import Server
    from flambeau.serving.workers import worker_factory
    from flambeau.serving.workers.remote_worker import RemoteWorker
    from flambeau.wire.channel import to_frame
    from flambeau.wire.messages import Part, Ready, Work

    workers = []

    class Worker(RemoteWorker):
        """Has loaded its model, and no process."""

        async def run(self) -> Any:
            self._new_channel().connection_made(Transport())
            self._process.note_ready = lambda: None
            self._receive([Ready()])
            workers.append(self)
            return await self.ended

    worker_factory.RemoteWorker = Worker
    folder = Path(tempfile.mkdtemp())
    (folder / "handler.py").write_text(HANDLER)
    config = ServerConfig(measure=MetricsConfig(system=False), crash_folder=folder / "crashes")
    async with Server(config) as server:
        one = ModelConfig(min_workers=1, max_workers=1)
        await server.register("m", path=folder, name="m", handler="handler.py", config=one, wait=True)
        limits = HttpLimits(max_body_bytes=1 << 20, share_from_bytes=1 << 20, keep_alive_s=60, read_timeout_s=60)
        check = HostCheck(config.allowed_hosts, config.cors)
        app = Router(InferenceApi(server).routes(), style=config.error_style, host_check=check)
        listener = Listener(
            app, limits, None, common_headers(()), server.telemetry.traffic, server.access_log, room=ConnectionRoom(99)
        )
        clients = [(HttpConnection(listener), Transport()) for _ in range(num_clients)]
        for client, transport in clients:
            client.connection_made(transport)
        head = "".join(f"{name}: {value}\r\n" for name, value in (*HEADERS, ("content-length", len(BODY))))
        request = b"POST /predictions/m HTTP/1.1\r\n%b\r\n%b" % (head.encode(), BODY)
        channel, jobs = workers[0]._channel, workers[0]._jobs

        def run(number: int) -> None:
            for _ in range(number // num_clients):
                for client, _ in clients:
                    client.get_buffer(0)[: len(request)] = request
                    client.buffer_updated(len(request))
                while jobs:
                    now = time.monotonic()
                    frame = to_frame([Part(next(iter(jobs)), ANSWER, work=Work(now, now, 0.0, 1e-6))])
                    channel.get_buffer(0)[: len(frame)] = frame
                    channel.buffer_updated(len(frame))
                channel._send_unsent()  # what the event loop would call next

        run(num_clients)
        assert all(transport.last.startswith(b"HTTP/1.1 200 ") for _, transport in clients)
        report(run, rounds)


def measure_worker(rounds: int) -> None:
    from flambeau.wire.channel import WorkerChannel, to_frame
    from flambeau.wire.messages import Load, Request
    from flambeau.wire.messages import Run as RunBatch
    from flambeau.worker import worker

    folder = Path(tempfile.mkdtemp())
    (folder / "handler.py").write_text(HANDLER)
    ours, its = socket.socketpair()
    headers = [*HEADERS, ("content-length", str(len(BODY)))]

    class Loop(worker.WorkerLoop):
        def run(self) -> None:
            def run(number: int) -> None:
                for i in range(number):
                    ours.sendall(to_frame([RunBatch([Request(i, "id", headers, BODY)])]))
                    self.handle(self.channel.receive())
                    reply = ours.recv(1 << 16)
                assert ANSWER in reply

            ours.recv(1 << 16)  # that it is ready
            report(run, rounds)

    worker.WorkerLoop = Loop
    ours.sendall(to_frame([Load("m", "1.0", str(folder), "handler.py", 1, None, True, True, 1 << 20)]))
    worker.serve(WorkerChannel(its, 1 << 20))


def start(subject: str, rounds: int, source: Path, before: tuple[str, ...] = ()) -> str:
    """Measure in a process of its own; what it and `before` print."""
    command = [*before, sys.executable, __file__, "--subject", subject, "--rounds", str(rounds)]
    command += ["--steady-clock"] if before else []
    environment = {**os.environ, "PYTHONPATH": str(source.absolute()), "PYTHONHASHSEED": "0"}
    return subprocess.run(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True).stdout


def instructions(subject: str, source: Path) -> float:
    """What the processor executes for a request."""
    valgrind = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    few, many = (
        int(
            re.findall(r"I +refs: +([\d,]+)", start(subject, number // PER_ROUND, source, valgrind))[0].replace(",", "")
        )
        for number in COUNTED
    )
    return (many - few) / (COUNTED[1] - COUNTED[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help=f"of {PER_ROUND} requests; default: %(default)s")
    parser.add_argument("--instructions", action="store_true", help="count them, with valgrind")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[2] / "src", help="default: %(default)s")
    parser.add_argument("--subject", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--steady-clock", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.steady_clock:  # how many batches a worker gets in advance depends on its speed, which valgrind changes
        time.monotonic = itertools.count(1000.0, 2**-17).__next__
    if asked.subject == "worker":
        measure_worker(asked.rounds)
    elif asked.subject:
        import uvloop

        uvloop.run(measure_server(int(asked.subject.split()[1]), asked.rounds))
    elif asked.instructions:
        for subject in SUBJECTS:
            print(f"{subject:20}{instructions(subject, asked.source):10,.0f} instructions", flush=True)
    else:
        print(f"{'µs of CPU time':20}{'least':>8}{'median':>9}")
        for subject in SUBJECTS:
            print(f"{subject:20}{start(subject, asked.rounds, asked.source).splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
