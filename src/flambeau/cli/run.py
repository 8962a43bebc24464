"""`flambeau run`: runs a handler in this process, without a server."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from flambeau.cli.local_model import open_model, to_request
from flambeau.cli.output import print_json
from flambeau.cli.stage_table import StageRow, median_call, print_rows, stage_rows
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.stage_timings import CallProfile, StageObserver, device_of


def run(
    path: Path,
    inputs: Sequence[Path],
    content_type: str | None,
    *,
    handler: str | None,
    repeat: int,
    as_json: bool,
) -> None:
    """Load a handler, run the inputs as one batch, and print the replies and a table of times."""
    sys.excepthook = show_error
    with open_model(path, batch_size=max(1, len(inputs)), handler=handler) as load:
        began = time.perf_counter()
        observer = StageObserver()
        worker = LocalWorker(load, observer)
        loaded_s = time.perf_counter() - began
        print(f"loaded {load.handler} in {loaded_s:.3f} s", file=sys.stderr)
        if not inputs:
            print("no input: pass a request body with --input FILE", file=sys.stderr)
            return
        requests = [to_request(i, file, content_type) for i, file in enumerate(inputs)]
        calls = []
        replies: list[bytes] = []
        for _ in range(repeat):
            replies = worker.handle(requests)
            calls.append(observer.call)
        worker.close()
        print_times(calls, loaded_s, worker)
        print_replies(replies, as_json=as_json)


def print_times(calls: Sequence[CallProfile], loaded_s: float, worker: LocalWorker) -> None:
    """Print the time of loading and of the call; of several calls, the first and the median."""
    initialize_s, device = worker.loaded.initialize_s, device_of(worker.loaded.handler)
    rows = [
        StageRow(name="import", output="", times_ms=((loaded_s - initialize_s) * 1000,)),
        StageRow(name="initialize", output=f"on {device}" if device else "", times_ms=(initialize_s * 1000,)),
    ]
    if len(calls) == 1:
        print_rows([*rows, *stage_rows(calls)], ["ms"])
    else:
        print_rows([*rows, *stage_rows([calls[0], median_call(calls)])], ["first ms", f"median of {len(calls)} ms"])


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback from the user's first frame on. The exception is not changed, so that a debugger has it all."""
    package = str(Path(__file__).parents[1])
    first = trace
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        if not (file.startswith((package, "<frozen")) or "typer" in file):
            break
        first = first.tb_next
    traceback.print_exception(kind, error, first or trace)


def print_replies(replies: Sequence[bytes], *, as_json: bool) -> None:
    """Print each reply on stdout, or a JSON list of their texts."""
    if as_json:
        print_json([reply.decode("utf-8", "replace") for reply in replies])
        return
    for reply in replies:
        sys.stdout.buffer.write(reply.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()
