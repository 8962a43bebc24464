"""The handler without a server: `bare_loop.py MODEL_FOLDER BODY` calls it in a plain loop and counts.

It says "ready" once warm. Each line on standard input is a number of seconds: it calls the handler that long and
prints how often as JSON.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

WARM_UP_CALLS = 10


def main() -> None:
    folder, body = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
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
    for line in sys.stdin:
        calls, started = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started) < float(line):
            handler.handle([{"body": body}], context)
            calls += 1
        print(json.dumps({"calls": calls, "seconds": elapsed_s}), flush=True)


if __name__ == "__main__":
    main()
