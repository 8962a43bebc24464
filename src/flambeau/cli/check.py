"""`flambeau check`: whether a handler is fit to be served."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from flambeau.checking.calling import Caller, attempt
from flambeau.checking.checks import Checks
from flambeau.checking.samples import Sample
from flambeau.checking.verdict import Verdict
from flambeau.cli.models import print_json
from flambeau.cli.opening import opened, to_request
from flambeau.cli.stage_table import Row, median_call, print_rows, rows_of
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.wire.messages import Load
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.stages import CallProfile, StageObserver

MARKS = {"ok": "✓", "note": "·", "problem": "✗"}
TIMED_CALLS = 5


def check(
    path: Path, samples: Path, content_type: str | None, *, batch_size: int, timeout_s: float, as_json: bool
) -> None:
    """Print a verdict per check; the exit status is 1 when one of them is a problem."""
    logging.getLogger("flambeau").setLevel(logging.ERROR)  # bad bodies are no news here
    found = read_samples(samples, content_type)
    verdicts, rows = [], list[Row]()
    with opened(path, batch_size=batch_size) as load:
        for verdict in examine(load, found, rows, timeout_s):
            verdicts.append(verdict)
            if not as_json:
                print(f"{MARKS[verdict.level]} {verdict.what}: {verdict.text}", flush=True)
    is_fit = all(verdict.level != "problem" for verdict in verdicts)
    if as_json:
        print_json({"ok": is_fit, "checks": [asdict(v) for v in verdicts], "stages": [asdict(row) for row in rows]})
    elif rows:
        print_rows(rows, ["median ms"])
    if not is_fit:
        sys.exit(1)


def examine(load: Load, samples: Sequence[Sample], rows: list[Row], timeout_s: float) -> Iterator[Verdict]:
    """Load the handler, run every check, and leave the times of its stages in `rows`."""
    observer = StageObserver()
    config = ServerConfig()
    worker, outcome = attempt(lambda: LocalWorker(load, observer), config.default_startup_timeout_s)
    if outcome.error is not None:
        yield Verdict("problem", "loads", outcome.reason)
        return
    yield Verdict("ok", "loads", f"{load.handler} in {outcome.seconds:.2f} s")
    caller = Caller(worker, timeout_s)
    yield from Checks(caller, samples, load.batch_size, config.max_response_bytes).run()
    rows.extend(stage_rows(caller, observer, samples))
    attempt(worker.close, timeout_s)


def stage_rows(caller: Caller, observer: StageObserver, samples: Sequence[Sample]) -> list[Row]:
    """The stages of the median call of a few."""
    calls: list[CallProfile] = []
    deadline = time.monotonic() + 1
    for sample in (samples[i % len(samples)] for i in range(TIMED_CALLS)):
        if caller.call([sample]).error is None:
            calls.append(observer.call)
        if time.monotonic() > deadline:
            break
    return rows_of([median_call(calls)]) if calls else []


def read_samples(path: Path, content_type: str | None) -> list[Sample]:
    """Each file of a folder as a request, or the one file."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a folder of request bodies with --samples")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".")
    if not files:
        raise ConfigError(f"{path} holds no files; put request bodies there that the handler should answer")
    requests = [to_request(i, file, content_type) for i, file in enumerate(files)]
    return [Sample(f.name, r.headers[0][1], bytes(r.body)) for f, r in zip(files, requests, strict=True)]  # type: ignore[arg-type]
