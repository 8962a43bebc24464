"""Measures Flambeau and TorchServe side by side: same machine, archive, bodies and load, one server at a time.

    python benchmarks/serving/run.py --torchserve-venv PATH

needs wrk, and in the Python that runs it torch and Pillow (the models), and Flambeau. Peers that are not installed are
left out. The result is a dated JSON file; `report.py` turns it into a table. Only loopback is used.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import machine
import results
from measure import Bench, Record, Records, measure
from peers import PEERS, Peer
from workloads import MEMORY_REQUESTS, WORKLOADS, Case, tasks_of

SHOWN = (
    *(
        "chunks_per_s",
        "rps",
        "p50_ms",
        "p99_ms",
        "errors",
        "first_chunk_ms",
        "bad_answers",
        "slow_delay_ms",
        "of_bare_loop",
    ),
    *("listening_s", "first_answer_s", "idle_rss_mb", "after_rss_mb", "requests"),
    *("server_cores", "client_cores", "other_cores", "steal_cores"),
)

Take = Callable[[], Records]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="flambeau,torchserve-tuned", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (default %(default)s)")
    parser.add_argument("--seconds", type=int, default=8, help="length of a point (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="seconds of load before a point (default %(default)s)")
    parser.add_argument("--memory-requests", type=int, default=MEMORY_REQUESTS, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results", help="folder for the result"
    )
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="the Python that has Flambeau")
    parser.add_argument(
        "--torchserve-venv",
        type=Path,
        default=Path(os.environ.get("FLAMBEAU_TORCHSERVE_VENV", "torchserve-is-not-installed")),
        help="virtual environment with TorchServe (or FLAMBEAU_TORCHSERVE_VENV)",
    )
    arguments = parser.parse_args()
    arguments.peers, arguments.workloads = arguments.peers.split(","), arguments.workloads.split(",")
    for name, known in (("peers", PEERS), ("workloads", WORKLOADS)):
        if unknown := [value for value in getattr(arguments, name) if value not in known]:
            parser.error(f"unknown {name}: {', '.join(unknown)}; known are {', '.join(known)}")
    if shutil.which("wrk") is None:
        parser.error("wrk is not installed")
    return arguments


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def installed_peers(names: list[str], python: Path, torchserve_venv: Path) -> list[Peer]:
    peers = []
    for name in names:
        peer = PEERS[name](python.absolute(), torchserve_venv.absolute())
        if peer.is_installed():
            peers.append(peer)
        else:
            say(f"{name} is not installed, left out")
    return peers


def turns(bench: Bench, peers: list[Peer], case: Case, number: int) -> Iterator[tuple[str, Take]]:
    """The peers of a case, in an order that rotates by one every round."""
    order: list[tuple[str, Take]] = [(peer.name, partial(measure, bench, peer, case)) for peer in peers]
    first = number % len(order)
    yield from order[first:] + order[:first]


def run_rounds(bench: Bench, peers: list[Peer], arguments: argparse.Namespace, records: list[Record]) -> None:
    """Fills `records` during the run, so that an interrupted run keeps its measurements."""
    for number in range(arguments.rounds):
        for workload in arguments.workloads:
            for case in WORKLOADS[workload]:
                for name, take in turns(bench, peers, case, number):
                    label = {"round": number + 1, "peer": name, "workload": workload}
                    progress = f"round {number + 1}/{arguments.rounds} {name:16}"
                    try:
                        with closing(take()) as taken:  # so that an interruption stops the server at once
                            for record in taken:
                                records.append({**label, **record})
                                say(f"{progress} {brief(record)}")
                    except Exception as error:  # one broken point must not cost the others
                        records.append({**label, "case": case.name, "failure": type(error).__name__})
                        say(f"{progress} {case.name} failed: {error!r}")


def brief(record: Record) -> str:
    """A record as one line of progress."""
    figures = ", ".join(f"{key} {record[key]:,}" for key in SHOWN if record.get(key) is not None)
    return f"{record['point']}: {figures}{' NOISY' if record.get('noisy') else ''}"


def command_line(arguments: argparse.Namespace) -> str:
    """The command that repeats this run, without anything that belongs to this machine."""
    return (
        f"python benchmarks/serving/run.py --peers {','.join(arguments.peers)} "
        f"--workloads {','.join(arguments.workloads)} --rounds {arguments.rounds} --seconds {arguments.seconds} "
        f"--warm-up {arguments.warm_up} --memory-requests {arguments.memory_requests}"
    )


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the server too, like Ctrl-C
    peers = installed_peers(arguments.peers, arguments.python, arguments.torchserve_venv)
    if not peers:
        say("nothing to measure")
        return 1
    records: list[Record] = []
    is_finished, started, date = False, time.monotonic(), datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(
            assets=Path(scratch) / "assets",
            scratch=Path(scratch),
            seconds=arguments.seconds,
            warm_up_s=arguments.warm_up,
            memory_requests=arguments.memory_requests,
            python=arguments.python.absolute(),
        )
        bench.assets.mkdir()
        say("making models and bodies")
        script = Path(__file__).parent / "assets.py"
        tasks = sorted(tasks_of(arguments.workloads))
        subprocess.run([bench.python, "-W", "ignore", script, bench.assets, *tasks], check=True, timeout=300)
        try:
            run_rounds(bench, peers, arguments, records)
            is_finished = True
        except KeyboardInterrupt:
            say("interrupted; keeping what was measured")
    if not records:
        return 130
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": command_line(arguments),
        "finished": is_finished,
        "duration_s": round(time.monotonic() - started),
        "machine": machine.describe(),
        "versions": results.versions(arguments.python.absolute(), arguments.torchserve_venv.absolute()),
        **results.summarize(records),
    }
    file = results.write(result, arguments.out)
    say(f"result in {file.name}")
    print(file)
    return 0 if is_finished else 130


if __name__ == "__main__":
    sys.exit(main())
