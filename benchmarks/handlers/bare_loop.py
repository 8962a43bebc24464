"""`bare_loop.py ARCHIVE BODY BATCH_SIZE`: the handler of an archive, called in a plain loop, without a server.

It says "ready" once warm. Each line on standard input is a number of seconds; the answer is rows per second.
"""

import sys
import time
from pathlib import Path

from flambeau.serving.model_sources.store import Store
from flambeau.wire.messages import Load
from flambeau.worker.inputs import read_headers
from flambeau.worker.loader import load_handler
from flambeau.worker.model import new_context

WARM_UP_CALLS = 10


def main() -> None:
    import asyncio

    archive, body, batch_size = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), int(sys.argv[3])
    store = Store(None)
    source = store.open_path(archive)
    assert source.manifest
    load = Load(
        archive.stem, "1.0", str(source.folder), source.manifest.handler or "", batch_size, None, True, True, 1 << 30
    )
    context = new_context(load)
    context.connect(None, read_headers)  # type: ignore[arg-type]
    handle = load_handler(load.handler, source.folder, context, asyncio.new_event_loop()).handle

    from flambeau.wire.messages import Request

    requests = [Request(i, str(i), [], b"") for i in range(batch_size)]

    def call() -> None:
        context.begin(requests, [None] * batch_size)
        handle([{"body": bytearray(body)} for _ in range(batch_size)], context)

    for _ in range(WARM_UP_CALLS):
        call()
    print("ready", flush=True)
    for line in sys.stdin:
        calls, began = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < float(line):
            call()
            calls += 1
        print(calls * batch_size / elapsed_s, flush=True)


if __name__ == "__main__":
    main()
