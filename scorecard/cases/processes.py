"""Processes that die, hang, grow or multiply."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from http.client import HTTPException
from pathlib import Path

from fault.test_worker_storms import children_of
from scorecard import HANDLERS
from scorecard.case import Case, Stage
from scorecard.probes import LatencyProbe, Memory, OwnAnswersClient, is_alive, is_ours, wait_for
from support.archives import pack_handler
from support.running import HANDLERS as TEST_HANDLERS
from support.running import RunningServer


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal one process, if this run has started it."""
    if pid <= 1 or not is_ours(pid):
        return
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def stuck_workers(stage: Stage) -> None:
    server = stage.serve("obedient.py", "--workers", "2")
    pids = server.worker_pids("obedient")
    note = stage.folder / "holds"
    server.at_once(lambda order: server.predict("obedient", order), [{"do": "hold the lock", "note": str(note)}])
    server.until(lambda: note.exists() and note.read_text())
    [idle] = [pid for pid in pids if str(pid) != note.read_text()]
    kill(idle, signal.SIGSTOP)
    stage.forget(server)
    server.process.kill()
    server.process.wait()
    gone_s = wait_for(lambda: not any(map(is_alive, pids)), 10)
    left = [pid for pid in pids if is_alive(pid)]
    stage.equal("workers left after the server was killed", len(left), 0)
    stage.note("all are gone after", "never" if gone_s is None else gone_s, "s")
    for pid in left:
        kill(pid, signal.SIGCONT)
        kill(pid)


def memory_of_children(stage: Stage) -> None:
    config = "workerMemoryLimitMb: 250\nminWorkers: 1\nmaxWorkers: 1\n"
    archive = pack_archive(stage, "obedient", config)
    server = stage.serve(archive)
    began = time.monotonic()
    reply = server.predict("obedient", {"do": "child eats", "mb": 500, "s": 15})
    stage.equal("status when a child of the worker passes workerMemoryLimitMb", reply.status, 507)
    stage.note("answered after", time.monotonic() - began, "s")
    stage.equal("status of the next request", server.predict("obedient", {"do": "answer"}).status, 200)


def pack_archive(stage: Stage, handler: str, config: str | None = None, name: str | None = None) -> Path:
    """An archive of a handler of the scorecard."""
    from flambeau.archive.pack import Recipe, pack

    folder = stage.new_folder("pack")
    settings = None
    if config is not None:
        settings = folder / "model-config.yaml"
        settings.write_text(config)
    recipe = Recipe(
        model_name=name or handler, version="1.0", handler=str(HANDLERS / f"{handler}.py"), config_file=settings
    )
    return pack(recipe, folder, force=True)


def too_many_workers(stage: Stage) -> None:
    pack_handler(stage.folder, "echo", name="other")
    for method, target in (
        ("PUT", "/models/echo?min_worker=1&max_worker=2000000000"),
        ("PUT", "/models/echo?min_worker=100000&max_worker=100000"),
        ("PUT", "/models/echo?min_worker=2000000000&max_worker=2000000000"),
        ("POST", "/models?url=other.mar&initial_workers=2000000000&synchronous=false"),
    ):
        server = stage.serve("echo.py", "--model-store", stage.folder)
        guard = Guard(server, max_children=20, max_mb=1000)
        with guard, LatencyProbe(server) as probe:
            stage.equal(f"status of {target.partition('?')[2]}", status_of(server, method, target), 400)
        if guard.reason or server.process.poll() is not None:
            stage.equal("the server had to be killed", guard.reason or "no", "no")
            stage.forget(server)
        else:
            probe.judge(stage)


def status_of(server: RunningServer, method: str, target: str) -> int | str:
    try:
        return server.manage(method, target, timeout=20).status
    except (OSError, HTTPException) as error:
        return type(error).__name__


class Guard:
    """Kills the server when it starts too many processes or takes too much memory: the machine is shared."""

    def __init__(self, server: RunningServer, *, max_children: int, max_mb: float) -> None:
        self._server, self._max_children, self._max_mb = server, max_children, max_mb
        self.reason = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        pid = self._server.process.pid
        while not self._is_over.wait(0.02) and self._server.process.poll() is None:
            try:
                num_children, megabytes = len(children_of(pid)), Memory.of(pid).rss
            except OSError:
                return
            if num_children > self._max_children or megabytes > self._max_mb:
                self.reason = f"{num_children} processes, {megabytes:.0f} MB"
                self._server.process.kill()
                self._server.process.wait()


def killed_under_load(stage: Stage) -> None:
    server = stage.serve("echo.py", "--workers", "4")
    num_killed = 0
    with OwnAnswersClient(server, connections=8) as client, LatencyProbe(server) as probe:
        for _ in range(stage.scale.of(30, 4)):
            ready = server.until(lambda: pids if len(pids := server.worker_pids("echo")) >= 2 else None, 40)
            kill(ready[num_killed % len(ready)])
            num_killed += 1
            time.sleep(0.3)
    stage.note("workers killed", num_killed)
    client.judge(stage, refusals=False)
    probe.judge(stage)


def recovery_time(stage: Stage) -> None:
    names = [f"model-{i}" for i in range(stage.scale.of(7, 3))]
    archives = [pack_handler(stage.folder, "torchless", name=name) for name in names]
    server = stage.serve(*archives)
    times = []
    for name in names:
        assert server.predict(name, {}).json["torch"] is False
        [pid] = server.worker_pids(name)
        began = time.monotonic()
        kill(pid)
        reply = server.predict(name, {})
        while reply.status != 200 or pid in server.worker_pids(name):
            reply = server.predict(name, {})
        times.append(time.monotonic() - began)
    stage.at_most("from the kill to the next answer, median", statistics.median(times), 0.5, "s")
    stage.note("slowest", max(times), "s")


def hung_handler(stage: Stage) -> None:
    server = stage.serve(str(TEST_HANDLERS / "faulty.py"), "--response-timeout", "1", "--workers", "2")
    with LatencyProbe(server) as probe:
        began = time.monotonic()
        reply = server.predict("faulty", {"do": "hang"})
        stage.at_most("the client has its answer after", time.monotonic() - began, 10, "s")
    stage.equal("status", reply.status, 500)
    stage.equal("status of the next request", server.predict("faulty", {"do": "answer"}).status, 200)
    probe.judge(stage)


CASES = (
    Case(
        name="30 workers killed under load",
        group="faults",
        promise="Every request is answered with 200, and with its own answer.",
        run=killed_under_load,
        is_quick=True,
    ),
    Case(
        name="Recovery of a worker without torch",
        group="faults",
        promise="The next answer comes within 0.5 s of a worker's death.",
        run=recovery_time,
        is_quick=True,
    ),
    Case(
        name="kill -9 of the server with stuck workers",
        group="faults",
        promise="No worker stays, also one that holds the interpreter's lock or is stopped.",
        run=stuck_workers,
    ),
    Case(
        name="Memory of a worker's children",
        group="faults",
        promise="workerMemoryLimitMb counts the children of a worker: 507, and a new worker.",
        run=memory_of_children,
    ),
    Case(
        name="Millions of workers",
        group="faults",
        promise="The number of workers has a limit: 400, before any of them is started.",
        run=too_many_workers,
    ),
    Case(
        name="A handler that hangs",
        group="faults",
        promise="Its client gets an error after responseTimeout; the worker is replaced.",
        run=hung_handler,
    ),
)
