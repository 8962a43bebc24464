"""Measures Predictions over gRPC, Flambeau and TorchServe in turn: same machine, archive, bodies and client.

    python benchmarks/grpc/run.py --torchserve-venv PATH

TorchServe is left out where it is not installed. The result is a dated JSON file. Takes about a minute.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402
from peers import Flambeau, Launch, Peer, TorchServe  # noqa: E402
from server import Server, find_ports  # noqa: E402
from workloads import Body  # noqa: E402

POINTS = {"echo, 1 call at a time": (1, 0), "echo, 16 at a time": (16, 0), "64 KiB, 16 at a time": (16, 65_536)}
SETTLE_S = 1.0
SUMMARISED = ("rps", "calls_per_core_s", "p50_ms", "p99_ms", "errors", "noisy")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3, help="length of a point (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    parser.add_argument(
        "--torchserve-venv",
        type=Path,
        default=Path(os.environ.get("FLAMBEAU_TORCHSERVE_VENV", "torchserve-is-not-installed")),
        help="virtual environment with TorchServe (or FLAMBEAU_TORCHSERVE_VENV)",
    )
    return parser.parse_args()


def make_archive(folder: Path) -> Path:
    """The echo model of the serving benchmark: no torch, one worker."""
    path = folder / "bench.mar"
    model = {"modelName": "bench", "modelVersion": "1.0", "handler": "echo_handler.py"}
    manifest = {"createdOn": "01/01/2026 00:00:00", "runtime": "python", "archiverVersion": "0.12.0", "model": model}
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(HERE.parent / "serving" / "handlers" / "echo_handler.py", "echo_handler.py")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({**manifest, "model": {**model, "configFile": "c.yaml"}}))
        archive.writestr("c.yaml", "minWorkers: 1\nmaxWorkers: 1\n")
    return path


def launch(peer: Peer, archive: Path, folder: Path, port: int) -> tuple[Launch, int]:
    """The command of a server, and its gRPC port."""
    ready = peer.launch(archive, folder, port)
    if isinstance(peer, Flambeau):
        ready.command.extend(["--grpc-port", str(port + 3), "--log-level", "warning"])
    return ready, port + 3


def measure(peer: Peer, archive: Path, folder: Path, seconds: float) -> dict[str, dict[str, float]]:
    """All points on one server."""
    folder.mkdir()
    ready, port = launch(peer, archive, folder, find_ports())
    found = {}
    with Server(ready, folder) as server:
        server.wait_listening()
        server.wait_answer(Body(file="echo.json", content_type="application/json"), b'{"id": 1}')
        for point, (concurrency, size) in POINTS.items():
            words = [f"127.0.0.1:{port}", "predict", str(concurrency), str(SETTLE_S), str(size)]
            command = [sys.executable, str(HERE / "client.py")]
            subprocess.run([*command, *words], check=True, capture_output=True)
            words[3] = str(seconds)
            before = machine.Usage.now(server.processes())
            answer = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
            cores = machine.cores_between(before, machine.Usage.now(server.processes()))
            kept = ("server_cores", "client_cores", "other_cores", "steal_cores", "noisy")
            figures = {**json.loads(answer.stdout), **{key: cores[key] for key in kept}}
            # What a call costs the server; the one figure that neighbors on the machine change little.
            figures["calls_per_core_s"] = round(figures["rps"] / max(cores["server_cores"], 0.01))
            found[point] = figures
    return found


def main() -> None:
    asked, began = arguments(), time.monotonic()
    peers: list[Peer] = [Flambeau(Path(sys.executable))]
    peers += [TorchServe(asked.torchserve_venv.absolute(), is_tuned=tuned) for tuned in (False, True)]
    rounds: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-", ignore_cleanup_errors=True) as scratch:
        archive = make_archive(Path(scratch))
        for number in range(asked.rounds):
            for peer in filter(lambda peer: peer.is_installed(), peers):
                points = measure(peer, archive, Path(scratch) / f"{peer.name}-{number}", asked.seconds)
                for point, figures in points.items():
                    print(f"{peer.name:18} {point:24} {figures}", file=sys.stderr)
                    rounds.append({"round": number + 1, "peer": peer.name, "point": point, **figures})
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for record in rounds:
        same = [r for r in rounds if (r["peer"], r["point"]) == (record["peer"], record["point"])]
        figures = {key: statistics.median(r[key] for r in same) for key in SUMMARISED}
        medians.setdefault(str(record["peer"]), {})[str(record["point"])] = figures
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": f"python benchmarks/grpc/run.py --rounds {asked.rounds} --seconds {asked.seconds:g}",
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), asked.torchserve_venv.absolute()),
        "medians": medians,
        "rounds": rounds,
    }
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-grpc.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
