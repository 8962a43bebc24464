"""Long prompts arrive while streams run: how long do the streams wait between two tokens?

    python benchmarks/llm/long_prompts.py [--prompts 20] [--kilobytes 100] [--streams 4] [--step-ms 5] [--rounds 3]
        [--refused] [--step-tokens 512]

The server and the engine are whole. With --step-ms a step takes this time and no CPU, as on a GPU, and prompts are
read, tokenized and scheduled but not computed: what is left is what the processes do beside the model. With --step-ms 0
the storyteller computes everything. With --refused the prompts are longer than the context, so that they are only read
and tokenized. Gaps before and after the prompts arrive are of the same streams; `seconds` is how long it takes to
answer all prompts, and `streamed_s` for how much of it the streams last. `steps` are gaps between steps without the
time for which the engine's thread waited for a core. The result is a dated JSON file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import machine  # noqa: E402
import results  # noqa: E402
from http_cost import HANDLER, TARGET  # noqa: E402
from http_streams import NAME, first_token_s  # noqa: E402
from server import find_ports  # noqa: E402

CONTEXT = 1 << 17
SHORT_CONTEXT = 8192  # longer than what a stream generates
CONFIG = """
minWorkers: 1
maxWorkers: 1
handler:
  model_path: {folder}
  max_num_seqs: 32
  max_step_tokens: {step_tokens}
  num_blocks: {blocks}
"""
# Notes of each step when it began, how long its thread has waited for a core by then, and the sequences that run.
STEP_LOG = """
import threading
import time
from flambeau.llm import Engine

plain_step = Engine.step
log = open({log!r}, "w", buffering=1)

def step(self):
    with open(f"/proc/self/task/{{threading.get_native_id()}}/schedstat") as file:
        print(time.monotonic(), file.read().split()[1], len(self._scheduler.running), file=log)
    return plain_step(self)

Engine.step = step
"""
WORDS = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "girl",
    "who",
    "loved",
    "to",
    "play",
    "in",
    "the",
    "garden",
)
ALONE_S = 2.5  # of streaming before the prompts arrive
LIMIT_S = 300.0


def prompt_of(serial: int, size_bytes: int) -> str:
    """A text that begins as no other does."""
    rng = random.Random(serial)
    text = " ".join(rng.choices(WORDS, k=size_bytes // 3))
    return f"{serial} {text}"[:size_bytes]


def send_prompts(port: int, prompts: Sequence[str], found: Any) -> None:
    """Send all prompts at once, each over a connection of its own."""
    bodies = [json.dumps({"prompt": text, "max_tokens": 1, "temperature": 0}) for text in prompts]
    with ThreadPoolExecutor(len(bodies)) as pool:
        began = time.time()
        statuses = [*pool.map(lambda body: send(port, body), bodies)]
        found.put((began, time.time(), statuses))


def send(port: int, body: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def run_round(port: int, serial: int, args: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    client = [sys.executable, HERE / "stream_client.py", port, args.streams, 100 * serial, num_tokens, "{}"]
    streams = subprocess.Popen([*map(str, client)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert streams.stdin is not None
    assert streams.stdout is not None
    streams.stdout.readline()
    streams.stdin.write("go\n")
    streams.stdin.flush()
    time.sleep(ALONE_S)
    found: Any = multiprocessing.Queue()
    prompts = [prompt_of(100 * serial + i, 1000 * args.kilobytes) for i in range(args.prompts)]
    sender = multiprocessing.Process(target=send_prompts, args=(port, prompts, found))
    sender.start()
    began, ended, statuses = found.get(timeout=LIMIT_S)
    sender.join()
    document = json.loads(streams.communicate(timeout=LIMIT_S)[0])
    if {*statuses} != {400 if args.refused else 200}:
        raise RuntimeError(f"the prompts got {statuses}")
    gaps: dict[str, list[float]] = {"alone": [], "arriving": []}
    for _, arrivals in document["streams"]:
        for i in range(10, len(arrivals)):
            if arrivals[i] < began - 0.5:  # not while the client makes the prompts
                gaps["alone"].append(arrivals[i] - arrivals[i - 1])
            elif began <= arrivals[i] and arrivals[i - 1] <= ended:
                gaps["arriving"].append(arrivals[i] - arrivals[i - 1])
    streamed = min(arrivals[-1] for _, arrivals in document["streams"]) - began
    return {"gaps": gaps, "seconds": ended - began, "streamed_s": min(ended - began, streamed)}


def summary(gaps: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(gaps)
    return {
        "tokens": len(ordered),
        "median_ms": round(1000 * statistics.median(ordered), 2),
        "p99_ms": round(1000 * ordered[int(0.99 * len(ordered))], 2),
        "max_ms": round(1000 * ordered[-1], 2),
    }


def write_model(folder: Path, args: argparse.Namespace) -> Path:
    """The storyteller with a longer context."""
    weights, model = folder / "weights", folder / NAME
    shutil.copytree(TARGET, weights)
    config = json.loads((weights / "config.json").read_text())
    config["max_position_embeddings"] = SHORT_CONTEXT if args.refused else CONTEXT
    (weights / "config.json").write_text(json.dumps(config))
    model.mkdir()
    blocks = 4 * config["max_position_embeddings"] // 16
    text = CONFIG.format(folder=weights, blocks=blocks, step_tokens=args.step_tokens)
    if args.step_ms:
        code = HANDLER.format(here=str(HERE), step_s=args.step_ms / 1000) + STEP_LOG.format(log=str(folder / "steps"))
        (model / "handler.py").write_text(code)
    else:
        text += "  name: gpt_handler\n"
    (model / "model-config.yaml").write_text(text)
    return model


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, port = write_model(folder, args), find_ports()
        command = [sys.executable, "-m", "flambeau.cli.main", "serve", model, "--port", port]
        command += ["--management-port", port + 1, "--metrics-port", port + 2]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=log)
        try:
            first_token_s(server, f"http://127.0.0.1:{port}", time.monotonic(), folder / "log")
            run_round(port, 1, args, args.tokens)  # not counted
            began = time.monotonic()
            rounds = [run_round(port, 2 + i, args, args.tokens) for i in range(args.rounds)]
            steps = step_gaps((folder / "steps").read_text(), began, args.streams) if args.step_ms else {}
        except BaseException:
            print((folder / "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait()
    found = {name: summary([gap for each in rounds for gap in each["gaps"][name]]) for name in ("alone", "arriving")}
    times = {name: [round(each[name], 2) for each in rounds] for name in ("seconds", "streamed_s")}
    return {**found, **times, "steps": {name: summary(gaps) for name, gaps in steps.items() if gaps}}


def step_gaps(log: str, began: float, num_streams: int) -> dict[str, list[float]]:
    """Seconds between steps while the streams run alone, and beside prompts; without waits for a core."""
    rows = [[float(word) for word in line.split()] for line in log.splitlines()]
    gaps: dict[str, list[float]] = {"alone": [], "arriving": []}
    for (before, waited, old), (now, waits, new) in pairwise(row for row in rows if row[0] > began):
        if min(old, new) >= num_streams:
            gaps["alone" if old == new == num_streams else "arriving"].append(now - before - (waits - waited) / 1e9)
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--kilobytes", type=int, default=100, help="of each prompt (default %(default)s)")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream (default %(default)s)")
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="of a decode step; 0: computed (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--refused", action="store_true", help="the prompts are longer than the context")
    parser.add_argument("--step-tokens", type=int, default=512, help="max_step_tokens (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    args = parser.parse_args()
    before = machine.Usage.now({})
    figures = measure(args)
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/long_prompts.py", *sys.argv[1:]]),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "other_cores": machine.cores_between(before, machine.Usage.now({}))["other_cores"],
        "figures": figures,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{date:%Y-%m-%d-%H%M}-llm-long-prompts.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(figures), file)


if __name__ == "__main__":
    main()
