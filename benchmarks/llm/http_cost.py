"""What streams through HTTP cost beside the engine alone, without a GPU: CPU time of each thread for each token.

    python benchmarks/llm/http_cost.py [--streams 1,32,128] [--step-ms 4,4.3,6.2] [--request '{"logprobs": 2}']

The engine is the whole one, with the shipped model's tokenizer, but a decode step only takes a given time: the worker
sleeps meanwhile, as it waits for a GPU. Rates depend on how busy the machine is; CPU times do so less. The engine alone
makes texts too. Takes half a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

from http_streams import NAME, NEW_TOKENS, ask, first_token_s  # noqa: E402
from server import find_ports  # noqa: E402

import flambeau.examples.storyteller  # noqa: E402

TARGET = Path(flambeau.examples.storyteller.__file__).parent / "target"
HANDLER = """
import sys
sys.path.insert(0, {here!r})
from flambeau.handlers.gpt import GptHandler
from paced_backend import use_paced_backend

class PacedHandler(GptHandler):
    def initialize(self, context):
        use_paced_backend({step_s})
        super().initialize(context)
"""
CONFIG = """
minWorkers: 1
maxWorkers: 1
handler:
  model_path: {target}
  max_num_seqs: {places}
  num_blocks: {blocks}
"""


def alone(number: int, step_s: float) -> tuple[float, float]:
    """Tokens/s of the engine alone while all streams run, and its CPU time for each token, in µs."""
    from paced_backend import use_paced_backend

    from flambeau.llm import Engine, SamplingParams

    use_paced_backend(step_s)
    engine = Engine.from_pretrained(TARGET, device="cpu", max_num_seqs=number, num_blocks=blocks_for(number))
    rng, params = random.Random(number), SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for i in range(number):
        engine.add(str(i), [rng.randrange(300, 4000) for _ in range(6)], params)
    num_tokens, since, spent, now = 0, 0.0, 0.0, 0.0
    while engine.has_work:
        outputs = engine.step()
        if not since and len(outputs) == number:
            since, spent = time.perf_counter(), time.thread_time()
        elif len(outputs) == number:
            num_tokens, now = num_tokens + number, time.perf_counter()
    return num_tokens / (now - since), 1e6 * (time.thread_time() - spent) / num_tokens


def blocks_for(number: int) -> int:
    return number * (-(-NEW_TOKENS // 16) + 2) + 8


def served(number: int, step_s: float, rounds: int, options: dict[str, Any]) -> list[Any]:
    """The rates of some rounds through a server."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = folder / NAME
        model.mkdir()
        (model / "handler.py").write_text(HANDLER.format(here=str(HERE), step_s=step_s))
        (model / "model-config.yaml").write_text(CONFIG.format(target=TARGET, places=number, blocks=blocks_for(number)))
        port = find_ports()
        command = [sys.executable, "-m", "flambeau.cli.main", "serve", model, "--port", port]
        command += ["--management-port", port + 1, "--metrics-port", port + 2]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=log)
        try:
            first_token_s(server, f"http://127.0.0.1:{port}", time.monotonic(), folder / "log")
            return [ask(port, server.pid, number, **options) for _ in range(rounds)]
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,128", help="default: %(default)s")
    parser.add_argument("--step-ms", default="4,4.3,6.2", help="of a step with each number (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--request", type=json.loads, default={}, help="further fields of each request, as JSON")
    asked = parser.parse_args()
    for number, step_ms in zip(asked.streams.split(","), asked.step_ms.split(","), strict=True):
        rate, cpu_us = alone(int(number), float(step_ms) / 1000)
        print(f"{number:>4} streams  engine alone  {rate:9,.0f} tokens/s  engine thread {cpu_us:6.1f} µs a token")
        for each in served(int(number), float(step_ms) / 1000, asked.rounds, asked.request):
            spent = "  ".join(f"{name} {us:.1f}" for name, us in sorted(each.cpu_us.items()))
            share = each.tokens_per_s / rate
            print(f"{'':14}through HTTP  {each.tokens_per_s:9,.0f} tokens/s ({share:.0%})  µs a token: {spent}")


if __name__ == "__main__":
    main()
