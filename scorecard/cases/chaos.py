"""Kills, scaling, registrations and disconnects at once."""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable

from scorecard.case import Case, Stage
from scorecard.cases.processes import kill
from scorecard.probes import LatencyProbe, MemoryProbe, OwnAnswersClient
from support.archives import pack_handler
from support.running import RunningServer


class Disturber:
    """Does one thing again and again in a thread; counts it, and keeps what went wrong."""

    def __init__(self, action: Callable[[], None], pause_s: float) -> None:
        self._action, self._pause_s = action, pause_s
        self.count = 0
        self.errors: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._pause_s):
            try:
                self._action()
                self.count += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")


class Chaos:
    """The disturbances of one server."""

    def __init__(self, server: RunningServer, archive: str, seed: int) -> None:
        self._server, self._archive = server, archive
        self._dice = random.Random(seed)
        self._numbers = itertools.count()

    def kill_worker(self) -> None:
        if len(pids := self._server.worker_pids("echo")) > 1:  # one worker stays: requests are retried once only
            kill(self._dice.choice(pids))

    def scale(self) -> None:
        count = self._dice.randrange(2, 6)
        reply = self._server.manage("PUT", f"/models/echo?min_worker={count}&max_worker={count}", timeout=30)
        assert reply.status in (200, 202), f"scale: {reply.status} {reply.text[:200]}"

    def register(self) -> None:
        name = f"guest-{next(self._numbers)}"
        workers = self._dice.randrange(3)
        target = f"/models?url={self._archive}&model_name={name}&initial_workers={workers}&synchronous=false"
        reply = self._server.manage("POST", target, timeout=30)
        assert reply.status in (200, 202), f"register: {reply.status} {reply.text[:200]}"
        time.sleep(self._dice.random() * 0.3)
        reply = self._server.manage("DELETE", f"/models/{name}", timeout=30)
        assert reply.status == 200, f"unregister: {reply.status} {reply.text[:200]}"

    def disconnect(self) -> None:
        order = json.dumps({"do": "stream", "n": 50, "bytes": 10_000, "pause": 0.01}).encode()
        heads = [
            b"POST /predictions/obedient HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(order) + order,
            b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n" + b"x" * 200_000,
            b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
            b"POST /pre",
        ]
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=20) as client:
            client.sendall(self._dice.choice(heads))
            time.sleep(self._dice.random() * 0.02)


def chaos(stage: Stage) -> None:
    archive = pack_handler(stage.folder, "echo", name="guest")
    server = stage.serve("echo.py", "obedient.py", "--model-store", stage.folder)
    assert server.manage("PUT", "/models/echo?min_worker=3&max_worker=3&synchronous=true").status == 200
    disturbances = Chaos(server, archive.name, stage.scale.seed)
    with OwnAnswersClient(server):  # what is allocated once does not count as growth
        for _ in range(stage.scale.of(8, 2)):
            disturbances.scale()
            disturbances.register()
            disturbances.disconnect()
    seconds = 3 if stage.scale.is_quick else stage.scale.chaos_s
    with (
        MemoryProbe(server) as memory,
        OwnAnswersClient(server, connections=8) as client,
        LatencyProbe(server) as probe,
        Disturber(disturbances.kill_worker, 1.0) as kills,
        Disturber(disturbances.scale, 0.7) as scalings,
        Disturber(disturbances.register, 0.3) as registrations,
        Disturber(disturbances.disconnect, 0.02) as disconnects,
    ):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and server.process.poll() is None:
            time.sleep(0.1)
    stage.note("duration", seconds, "s")
    stage.note("kills", kills.count)
    stage.note("scale calls", scalings.count)
    stage.note("registrations", registrations.count)
    stage.note("disconnects", disconnects.count)
    client.judge(stage)
    answered = client.tally.answered / max(1, client.tally.total)
    stage.at_least("share answered with 200", round(100 * answered, 2), 99.9, "%")
    stage.none("management calls that failed", scalings.errors + registrations.errors)
    probe.judge(stage)
    if server.process.poll() is None:
        server.manage("PUT", "/models/echo?min_worker=3&max_worker=3&synchronous=true")
        memory.judge(stage, peak_mb=None)


CASES = (
    Case(
        name="Kills, scaling, registrations and disconnects at once",
        group="load",
        promise="No crash, no lost or crossed answer; /livez answers within 50 ms (p99); memory is back within 10 %.",
        run=chaos,
        limit_s=90,
    ),
)
