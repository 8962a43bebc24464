"""One key sends many requests at once, another one a second: how long does the other wait for its first token?

    python benchmarks/llm/fairness.py [--requests 1000] [--seconds 10] [--rounds 3] [--places 16] [--same-key]
        [--crowd-words 8] [--crowd-tokens 64]

The model is the storyteller that ships with the package. Alone and beside the load take turns. The requests that are
sent while the thousand arrive are counted too, and shown by themselves. The result is a dated JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "serving")]

import machine  # noqa: E402
import results  # noqa: E402
from server import find_ports  # noqa: E402

import flambeau.examples.storyteller  # noqa: E402

CONFIG = """
minWorkers: 1
maxWorkers: 1
jobQueueSize: {queue}
handler:
  name: gpt_handler
  model_path: {folder}
  temperature: 0.8
  max_num_seqs: {places}
  num_blocks: 4096
"""
PROMPT = "Once upon a time in a land far away"
STARTS_S = 120
ARRIVAL_S = 3  # while the thousand arrive


async def first_token_s(port: int, key: str, max_tokens: int, prompt: str = PROMPT) -> float:
    """Stream one completion; the time to its first text. Raises for any status but 200."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True})
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    first = 0.0
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode()} {(await reader.read()).decode()}")
    async for line in reader:
        if not first and line.startswith(b"data: {"):
            first = time.perf_counter() - began
    writer.close()
    return first


async def once_a_second(port: int, key: str, seconds: int) -> list[float]:
    """A request each second, whether the one before has ended or not."""
    tasks = []
    for _ in range(seconds):
        tasks.append(asyncio.create_task(first_token_s(port, key, 8)))
        await asyncio.sleep(1)
    return await asyncio.gather(*tasks)


async def crowd(port: int, key: str, number: int, num_words: int, max_tokens: int) -> None:
    """Many requests at once. No two prompts begin alike, unless they are short."""
    words = PROMPT.split()
    prompts = [PROMPT] * number
    if num_words > len(words):
        prompts = [" ".join(random.Random(i).choices(words, k=num_words)) for i in range(number)]
    tasks = [first_token_s(port, key, max_tokens, prompt) for prompt in prompts]
    await asyncio.gather(*tasks, return_exceptions=True)


def run_crowd(port: int, key: str, number: int, num_words: int, max_tokens: int) -> None:
    asyncio.run(crowd(port, key, number, num_words, max_tokens))


async def measure(port: int, busy: str, calm: str, args: argparse.Namespace) -> dict[str, Any]:
    for _ in range(3):
        await first_token_s(port, calm, 8)
    alone, arriving, beside, lasted = [], [], [], True
    for _ in range(args.rounds):
        alone += await once_a_second(port, calm, args.seconds)
        given = (port, busy, args.requests, args.crowd_words, args.crowd_tokens)
        load = multiprocessing.Process(target=run_crowd, args=given)  # beside what is measured
        load.start()
        arriving += await once_a_second(port, calm, ARRIVAL_S)
        beside += await once_a_second(port, calm, args.seconds)
        lasted = lasted and load.is_alive()
        load.terminate()
        load.join()
        await asyncio.sleep(2)
    found = {"alone": summary(alone), "arriving": summary(arriving), "beside": summary(beside)}
    whole = summary([*arriving, *beside])["p95_ms"]
    return {
        **found,
        "p95_ratio": round(found["beside"]["p95_ms"] / found["alone"]["p95_ms"], 2),
        "p95_ratio_with_arrival": round(whole / found["alone"]["p95_ms"], 2),
        "load_lasted": lasted,
    }


def summary(times: list[float]) -> dict[str, Any]:
    in_order = [round(1000 * each, 1) for each in times]
    times = sorted(times)
    p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
    return {
        "median_ms": round(1000 * statistics.median(times), 1),
        "p95_ms": round(1000 * p95, 1),
        "max_ms": round(1000 * times[-1], 1),
        "all_ms": in_order,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10, help="of each turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--crowd-words", type=int, default=8, help="of each prompt of the many (default %(default)s)")
    parser.add_argument("--crowd-tokens", type=int, default=64, help="generated for each (default %(default)s)")
    parser.add_argument("--same-key", action="store_true", help="both are one key: what it was without turns")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        port = find_ports(3)  # the first of three
        model = folder / "m"
        model.mkdir()
        target = Path(flambeau.examples.storyteller.__file__).parent / "target"
        text = CONFIG.format(folder=target, places=args.places, queue=2 * args.requests)
        (model / "model-config.yaml").write_text(text)
        keys = {name: {"key": name[0] * 40} for name in ("management", "inference", "API")}
        for name, secret in (("busy", "b" * 40), ("calm", "c" * 40)):
            keys[name] = {"key": secret, "api": "inference"}
        (folder / "key_file.json").touch(0o600)
        (folder / "key_file.json").write_text(json.dumps(keys))
        command = [
            sys.executable, "-m", "flambeau", "serve", str(model), "--port", str(port), "--require-token",
            "--management-port", str(port + 1), "--metrics-port", str(port + 2),
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=os.environ)
        try:
            calm = "b" * 40 if args.same_key else "c" * 40
            wait_ready(port, calm)
            began, before = time.monotonic(), machine.Usage.now({})
            figures = asyncio.run(measure(port, "b" * 40, calm, args))
            write_result(args, figures, time.monotonic() - began, machine.cores_between(before, machine.Usage.now({})))
        except BaseException:
            print((folder / "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait(60)


def write_result(args: argparse.Namespace, figures: dict[str, Any], duration_s: float, noise: dict[str, Any]) -> None:
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/fairness.py", *sys.argv[1:]]),
        "duration_s": round(duration_s),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "requests": args.requests,
        "places": args.places,
        "crowd": {"words": args.crowd_words, "tokens": args.crowd_tokens},
        "other_cores": noise["other_cores"],  # those of the server and of the clients are among them
        "figures": figures,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{date:%Y-%m-%d-%H%M}-llm-fairness.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in figures.items() if "ratio" in name}), file)


def wait_ready(port: int, key: str) -> None:
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            asyncio.run(first_token_s(port, key, 1))
            return
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    main()
