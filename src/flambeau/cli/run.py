"""`flambeau run`: a handler in this process, without a server, for a debugger."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from flambeau.cli.opening import opened, to_request
from flambeau.cli.stage_table import Row, median_call, print_rows, rows_of
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.stages import CallProfile, StageObserver, device_of


def run(
    path: Path,
    inputs: Sequence[Path],
    content_type: str | None,
    *,
    handler: str | None,
    repeat: int,
    as_json: bool,
) -> None:
    """Load a handler, give it the inputs as one batch, print what it answers and where the time went."""
    sys.excepthook = show_error
    with opened(path, batch_size=max(1, len(inputs)), handler=handler) as load:
        began = time.perf_counter()
        observer = StageObserver()
        worker = LocalWorker(load, observer)
        loaded_s = time.perf_counter() - began
        print(f"loaded {load.handler} in {loaded_s:.3f} s", file=sys.stderr)
        if not inputs:
            print("nothing was run: give it a request with --input FILE", file=sys.stderr)
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
    """The table: how it loaded, then the call, or the first one and the median of all."""
    initialize_s, device = worker.loaded.initialize_s, device_of(worker.loaded.handler)
    rows = [
        Row(name="import", output="", times_ms=((loaded_s - initialize_s) * 1000,)),
        Row(name="initialize", output=f"on {device}" if device else "", times_ms=(initialize_s * 1000,)),
    ]
    if len(calls) == 1:
        print_rows([*rows, *rows_of(calls)], ["ms"])
    else:
        print_rows([*rows, *rows_of([calls[0], median_call(calls)])], ["first ms", f"median of {len(calls)} ms"])


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception from the user's first line on; the exception itself stays free for a debugger."""
    inside = str(Path(__file__).parents[1])
    first = trace
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        if not (file.startswith((inside, "<frozen")) or "typer" in file):
            break
        first = first.tb_next
    traceback.print_exception(kind, error, first or trace)


def print_replies(replies: Sequence[bytes], *, as_json: bool) -> None:
    """Print each reply on stdout; as JSON, a list of their texts."""
    if as_json:
        from flambeau.cli.models import print_json

        print_json([reply.decode("utf-8", "replace") for reply in replies])
        return
    for reply in replies:
        sys.stdout.buffer.write(reply.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()
