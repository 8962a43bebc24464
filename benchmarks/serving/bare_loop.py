"""The handler without a server: `bare_loop.py MODEL_FOLDER BODY SECONDS` calls it in a plain loop and counts.

It says "ready" once warm, starts at the first line on standard input, so that several loops can start together,
prints its count as JSON, and stays until standard input closes, so that its processor time can still be read.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

WARM_UP_CALLS = 20


def main() -> None:
    folder, body, seconds = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), float(sys.argv[3])
    sys.path.insert(0, str(folder))
    from bench_handler import BenchHandler

    context = SimpleNamespace(
        system_properties={"model_dir": str(folder)}, model_yaml_config={"handler": {"task": "image"}}
    )
    handler = BenchHandler()
    handler.initialize(context)
    for _ in range(WARM_UP_CALLS):
        handler.handle([{"body": body}], context)
    print("ready", flush=True)
    sys.stdin.readline()

    calls, started = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started) < seconds:
        handler.handle([{"body": body}], context)
        calls += 1
    print(json.dumps({"calls": calls, "seconds": elapsed_s}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
