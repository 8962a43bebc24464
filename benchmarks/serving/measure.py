"""Takes the measurements: one case on one server, or on no server at all."""

import json
import shutil
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
import machine
from assets import make_archive
from bare_loops import BareLoops
from peers import Peer
from server import Server, find_ports
from workloads import CHUNKS, MEMORY_REQUESTS, Case, Load

Record = dict[str, Any]
Records = Generator[Record, None, None]

STARTS_PER_ROUND = 3
TURNS = 5
MEMORY_LIMIT_S = 240
# What a server is still busy with when a client leaves must not count in the next point.
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Settings of every measurement: folders, duration of a point, and the Python to use."""

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
        "beside loop": measure_beside_loop,
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


def measure_beside_loop(bench: Bench, peer: Peer, case: Case) -> Records:
    """Alternates short turns of the server and of a bare loop, so that both see the same load of the machine."""
    point = case.loads[0]
    data, seconds = bench.body_of(point), bench.seconds * case.stretch / TURNS
    with _serving(bench, peer, case) as server:
        server.wait_answer(point.body, data)
        server.wait_workers(case.model.workers)
        archive = next((bench.scratch / "run" / "store").glob("*.mar"))
        with BareLoops(bench.python, archive, bench.assets / point.body.file, case.model.workers) as loops:
            load.run_steadily(server.launch, point.body, data, point.connections, seconds)
            before = machine.Usage.now(server.processes())
            turns, rates = [], []
            for _ in range(TURNS):
                turns.append(load.run_steadily(server.launch, point.body, data, point.connections, seconds))
                rates.append(loops.run(seconds))
            after = machine.Usage.now({**server.processes(), **loops.processes()})
    ratio = statistics.median(turn["rps"] / rate for turn, rate in zip(turns, rates, strict=True))
    cores = machine.cores_between(before, after)
    noisy = {"noisy": cores["noisy"], "steal_cores": cores["steal_cores"], "other_cores": cores["other_cores"]}
    loop_rps = round(statistics.median(rates), 2)
    yield {
        "point": point.point,
        "rps": round(statistics.median(turn["rps"] for turn in turns), 2),
        "p50_ms": round(statistics.median(turn["p50_ms"] for turn in turns), 1),
        "p99_ms": round(max(turn["p99_ms"] for turn in turns), 1),
        "errors": sum(turn["errors"] for turn in turns),
        "of_bare_loop": round(ratio, 4),
        "bare_loop_rps": loop_rps,
        **noisy,
    }


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
