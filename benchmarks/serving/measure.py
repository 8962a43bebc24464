"""Takes the measurements: one case on one server, or on no server at all."""

import json
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
import machine
from assets import make_archive
from peers import Peer
from server import Server, find_ports
from workloads import CHUNKS, MEMORY_REQUESTS, Case, Load

Record = dict[str, Any]
Records = Generator[Record, None, None]

STARTS_PER_ROUND = 3
MEMORY_LIMIT_S = 240
# What a server is still busy with when a client leaves must not count in the next point.
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every measurement needs: where assets and scratch files are, how long a point lasts, and a Python."""

    assets: Path
    scratch: Path
    seconds: int
    warm_up_s: int
    memory_requests: int
    python: Path

    def folder(self) -> Path:
        """An empty folder for the next server."""
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def body_of(self, point: Load) -> bytes:
        return (self.assets / point.body.file).read_bytes()


def measure(bench: Bench, peer: Peer, case: Case) -> Records:
    """The records of one case on one server, each as soon as it is taken."""
    take = {
        "load": _measure_loads,
        "stream": _measure_stream,
        "start": _measure_start,
        "memory": _measure_memory,
    }[case.kind]
    yield from take(bench, peer, case)


@contextmanager
def _serving(bench: Bench, peer: Peer, case: Case) -> Iterator[Server]:
    folder = bench.folder()
    store = folder / "store"
    store.mkdir()
    archive = make_archive(case.model, bench.assets, store)
    with Server(peer.launch(archive, folder, find_ports()), folder) as server:
        yield server


def _measure_loads(bench: Bench, peer: Peer, case: Case) -> Records:
    with _serving(bench, peer, case) as server:
        for point in case.loads:
            yield {"point": point.point, **_measure_load(bench, server, case, point)}


def _measure_load(bench: Bench, server: Server, case: Case, point: Load) -> Record:
    _, answer = server.wait_answer(point.body, bench.body_of(point))
    server.wait_workers(case.model.workers)
    if bench.warm_up_s:
        load.run_wrk(server.launch, point.body, bench.assets, point.connections, bench.warm_up_s)
        time.sleep(SETTLE_S)
    before = machine.Usage.now(server.processes())
    result = load.run_wrk(server.launch, point.body, bench.assets, point.connections, bench.seconds * case.stretch)
    after = machine.Usage.now(server.processes())
    return {"answer": _plain(answer), **result, **machine.cores_between(before, after)}


def _plain(answer: str) -> Any:
    """An answer without its layout, so that servers that indent JSON differently still agree."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer[:40]


def _measure_stream(bench: Bench, peer: Peer, case: Case) -> Records:
    with _serving(bench, peer, case) as server:
        server.wait_answer(case.loads[0].body, bench.body_of(case.loads[0]))
        cold_ms = load.first_chunk_ms(server.launch, bench.assets)
        for point in case.loads:
            record = _measure_load(bench, server, case, point)
            # A chunk is at least five bytes: a shorter answer has lost some.
            if record["bytes_per_answer"] < 5 * CHUNKS:
                record["errors"] = max(record["errors"], record["requests"])
            yield {"point": point.point, "chunks_per_s": round(record["rps"] * CHUNKS), **record}
        # Afterwards, so that Java has compiled what it wants to compile; the cold figure stands beside it.
        time.sleep(1)
        checked = load.check_streams(server.launch, bench.assets)
        yield {"point": f"{case.name} stream", "first_chunk_cold_ms": cold_ms, **checked}


def _measure_start(bench: Bench, peer: Peer, case: Case) -> Records:
    point = case.loads[0]
    for _ in range(STARTS_PER_ROUND):
        with _serving(bench, peer, case) as server:
            before = machine.Usage.now({})
            listening_s = server.wait_listening()
            first_answer_s, _ = server.wait_answer(point.body, bench.body_of(point))
            cores = machine.cores_between(before, machine.Usage.now(server.processes()))
            yield {
                "point": case.name,
                "listening_s": round(listening_s, 3),
                "first_answer_s": round(first_answer_s, 3),
                "steal_cores": cores["steal_cores"],
                "other_cores": cores["other_cores"],
                "noisy": cores["noisy"],
            }


def _measure_memory(bench: Bench, peer: Peer, case: Case) -> Records:
    point = case.loads[0]
    with _serving(bench, peer, case) as server:

        def memory() -> Record:
            time.sleep(2)
            return machine.memory_of(server.processes())

        server.wait_answer(point.body, bench.body_of(point))
        idle = memory()
        first = load.send(
            server.launch, point.body, bench.assets, point.connections, bench.memory_requests // 10, MEMORY_LIMIT_S
        )
        warm = memory()
        rest = load.send(
            server.launch,
            point.body,
            bench.assets,
            point.connections,
            bench.memory_requests - first["requests"],
            MEMORY_LIMIT_S,
        )
        busy = memory()
    requests = first["requests"] + rest["requests"]
    # A shorter run keeps its figures but does not answer the question of the goal.
    growth = "growth_mb" if requests >= MEMORY_REQUESTS else "growth_short_run_mb"
    yield {
        "point": case.name,
        "processes": idle["processes"],
        "idle_rss_mb": idle["rss_mb"],
        "idle_pss_mb": idle["pss_mb"],
        "after_rss_mb": busy["rss_mb"],
        "after_pss_mb": busy["pss_mb"],
        growth: round(busy["rss_mb"] - idle["rss_mb"], 1),
        "growth_once_warm_mb": round(busy["rss_mb"] - warm["rss_mb"], 1),
        "requests": requests,
        "errors": first["errors"] + rest["errors"],
    }


def measure_bare_loop(bench: Bench, case: Case) -> Records:
    """The same handler called in a plain loop, in as many processes as the server has workers."""
    point, folder, seconds = case.loads[0], bench.folder(), bench.seconds * case.stretch
    with zipfile.ZipFile(make_archive(case.model, bench.assets, folder)) as archive:
        archive.extractall(folder / "model")
    script = Path(__file__).parent / "bare_loop.py"
    command: list[Path | str] = [
        bench.python,
        script,
        folder / "model",
        bench.assets / point.body.file,
        str(seconds),
    ]
    loops: list[subprocess.Popen[str]] = []
    watchdog = threading.Timer(seconds + 120, _kill, [loops])
    watchdog.start()
    try:
        for _ in range(case.model.workers):
            loops.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
            )
        for loop in loops:
            _line(loop)
        before = machine.Usage.now(_table(loops))
        for loop in loops:
            assert loop.stdin
            loop.stdin.write("go\n")
            loop.stdin.flush()
        results = [json.loads(_line(loop)) for loop in loops]
        after = machine.Usage.now(_table(loops))
    finally:
        watchdog.cancel()
        _kill(loops)
    rps = sum(result["calls"] / result["seconds"] for result in results)
    yield {"point": point.point, "rps": round(rps, 2), "errors": 0, **machine.cores_between(before, after)}


def _kill(loops: "list[subprocess.Popen[str]]") -> None:
    for loop in loops:
        loop.kill()
        loop.wait()


def _line(loop: "subprocess.Popen[str]") -> str:
    assert loop.stdout
    line = loop.stdout.readline()
    if not line:
        raise load.LoadFailed("the bare loop ended early")
    return line


def _table(loops: "list[subprocess.Popen[str]]") -> dict[int, machine.Process]:
    table = machine.process_table()
    return {loop.pid: table[loop.pid] for loop in loops if loop.pid in table}
