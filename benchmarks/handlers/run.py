"""Measures handlers: compilation, pipelining, shared weights, and the overhead of serving.

    python benchmarks/handlers/run.py [--rounds 3] [--seconds 5] [--only tax,pipeline,compile,weights]

Each experiment alternates its variants in short turns; a result is the median of the ratios of neighboring turns.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from stand import MODELS, bare_loop, median, pack_model, photo, pss_mb, ratio, serving

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
import machine
from results import commit

RESULTS = Path(__file__).parents[1] / "results"
CORES = os.cpu_count() or 1
Report = dict[str, Any]


def save_weights(folder: Path, module: str, class_name: str, suffix: str = "pth") -> Path:
    """A file of random weights for a network of `models`."""
    sys.path.insert(0, str(MODELS))
    torch.manual_seed(0)
    net = getattr(__import__(module), class_name)().eval()
    path = folder / f"{module}.{suffix}"
    if suffix == "safetensors":
        from safetensors.torch import save_file

        save_file(net.state_dict(), path)
    elif suffix == "pt":
        torch.jit.script(net).save(path)
    else:
        torch.save(net.state_dict(), path)
    return path


def tax(folder: Path, rounds: int, seconds: float) -> Report:
    """One image worker against a bare loop; and four workers against two."""
    weights = save_weights(folder, "photo_net", "PhotoNet")
    archive = pack_model(folder, "photo", handler="photo_handler", net="photo_net", weights=weights)
    body = photo()
    served: list[float] = []
    bare: list[float] = []
    with serving(archive) as server, bare_loop(archive, body, 1, folder, CORES) as loop:
        server.rate(body, clients=2, seconds=1)
        for number in range(rounds * 4):  # short turns, so that both see the same weather
            one = lambda: served.append(server.rate(body, clients=2, seconds=seconds / 2))  # noqa: E731
            other = lambda: bare.append(loop.rate(seconds / 2))  # noqa: E731
            for turn in (one, other) if number % 2 else (other, one):
                turn()
    two: list[float] = []
    four: list[float] = []
    with serving(archive, workers=2) as pair, serving(archive, workers=4) as quartet:
        for number in range(rounds * 4):
            one = lambda: two.append(pair.rate(body, clients=8, seconds=seconds / 2))  # noqa: E731
            other = lambda: four.append(quartet.rate(body, clients=8, seconds=seconds / 2))  # noqa: E731
            for turn in (one, other) if number % 2 else (other, one):
                turn()
    return {
        "served_per_s": median(served),
        "bare_per_s": median(bare),
        "served_to_bare": ratio(served, bare),
        "two_workers_per_s": median(two),
        "four_workers_per_s": median(four),
        "four_to_two": ratio(four, two),
    }


def pipeline(folder: Path, rounds: int, seconds: float) -> Report:
    """JPEG decoding and a network, one worker, batches of 4: with and without `pipeline: true`."""
    weights = save_weights(folder, "photo_net", "PhotoNet")
    batches = "batchSize: 4\nmaxBatchDelay: 20\n"
    rates: dict[str, list[float]] = {"plain": [], "pipelined": []}
    archives = {
        name: pack_model(
            folder, name, handler="photo_handler", net="photo_net", weights=weights, config=batches + extra
        )
        for name, extra in (("plain", ""), ("pipelined", "pipeline: true\n"))
    }
    body = photo()
    with serving(archives["plain"]) as plain, serving(archives["pipelined"]) as pipelined:
        if plain.post(body) != pipelined.post(body):
            raise RuntimeError("the answers differ")
        for number in range(rounds * 4):
            for name, server in (("plain", plain), ("pipelined", pipelined))[:: 1 if number % 2 else -1]:
                rates[name].append(server.rate(body, clients=12, seconds=seconds / 2))
    return {
        "plain_per_s": median(rates["plain"]),
        "pipelined_per_s": median(rates["pipelined"]),
        "gain": ratio(rates["pipelined"], rates["plain"]),
    }


def compile_gain(folder: Path, rounds: int, seconds: float) -> Report:
    """The same network as it is and through torch.compile; and how long the first and the second start take."""
    weights = save_weights(folder, "mixer_net", "Mixer")
    body = torch.randn(64 * 256).numpy().tobytes()
    (folder / "example.bin").write_bytes(body)
    batches = "batchSize: 8\nmaxBatchDelay: 20\n"
    compiled = "pt2: {compile: {enable: true, backend: inductor}}\n"
    rates: dict[str, list[float]] = {"eager": [], "compiled": []}
    archives = {
        name: pack_model(
            folder, name, handler="mixer_handler", net="mixer_net", weights=weights, config=batches + extra
        )
        for name, extra in (("eager", ""), ("compiled", compiled))
    }
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    with serving(archives["compiled"], env=env) as first:
        cold_s = seconds_of_first_answers(first, body)
    with serving(archives["eager"]) as eager, serving(archives["compiled"], env=env) as fast:
        warm_s = seconds_of_first_answers(fast, body)
        if not torch.allclose(
            torch.tensor(json.loads(eager.post(body))), torch.tensor(json.loads(fast.post(body))), atol=1e-4
        ):
            raise RuntimeError("the answers differ")
        eager.rate(body, clients=16, seconds=1)
        for number in range(rounds * 4):
            for name, server in (("eager", eager), ("compiled", fast))[:: 1 if number % 2 else -1]:
                rates[name].append(server.rate(body, clients=16, seconds=seconds / 2))
    return {
        "eager_per_s": median(rates["eager"]),
        "compiled_per_s": median(rates["compiled"]),
        "gain": ratio(rates["compiled"], rates["eager"]),
        "first_compilation_s": round(cold_s, 2),
        "from_cache_s": round(warm_s, 2),
    }


def seconds_of_first_answers(server: Any, body: bytes) -> float:
    """How long it takes until a single row and a batch have been answered."""
    began = time.monotonic()
    server.post(body)
    server.burst(body, 8)
    return time.monotonic() - began


def weights(folder: Path, rounds: int, seconds: float) -> Report:
    """The memory of one and of four workers of a 400 MB model, each format; TorchScript cannot be mapped."""
    report: Report = {}
    body = b"[" + b",".join(b"0.5" for _ in range(2500)) + b"]"
    for name, suffix in (("safetensors", "safetensors"), ("state_dict", "pth"), ("torchscript", "pt")):
        file = save_weights(folder, "large_net", "Large", suffix)
        archive = pack_model(folder, name, handler="base_handler", net="large_net", weights=file, copied=suffix == "pt")
        for workers in (1, 4):
            with serving(archive, workers=workers) as server:
                server.rate(body, clients=8, seconds=max(3.0, seconds))  # every worker touches every weight
                pss, rss = pss_mb(server.workers())
            report[f"{name}_{workers}_workers"] = {"pss_mb": round(pss), "rss_mb": round(rss)}
        archive.unlink()
        file.unlink()
    return report


EXPERIMENTS: dict[str, Callable[[Path, int, float], Report]] = {
    "tax": tax,
    "pipeline": pipeline,
    "compile": compile_gain,
    "weights": weights,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", default=",".join(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    now = datetime.now(UTC)
    result: Report = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "commit": commit(),
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/handlers/run.py", *sys.argv[1:]]),
        "experiments": {},
    }
    for name in arguments.only.split(","):
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as folder:
            result["experiments"][name] = EXPERIMENTS[name](Path(folder), arguments.rounds, arguments.seconds)
        print(json.dumps({name: result["experiments"][name]}, indent=2), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{now:%Y-%m-%d-%H%M}-handlers.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
