"""`flambeau check`: checks whether a handler is ready to serve."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from flambeau.cli.output import StageRow, median_call, print_json, print_rows, stage_rows
from flambeau.cli.run import open_model, to_request
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.handler_checks.guarded_call import GuardedCaller, Sample, guarded_call
from flambeau.handler_checks.suite import HandlerChecks, Verdict
from flambeau.wire.messages import Load
from flambeau.worker.handler_mistakes import explain_training
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.stage_timings import CallProfile, StageObserver

MARKS = {"ok": "✓", "note": "·", "problem": "✗"}
TIMED_CALLS = 5
TIMED_CALLS_S = 1.0


def check(
    path: Path, samples: Path, content_type: str | None, *, batch_size: int, timeout_s: float, as_json: bool
) -> None:
    """Print a verdict per check; exit with status 1 if one of them is a problem."""
    logging.getLogger("flambeau").setLevel(logging.ERROR)  # malformed bodies are part of the checks
    found = read_samples(samples, content_type)
    verdicts, rows = [], list[StageRow]()
    with open_model(path, batch_size=batch_size) as load:
        for verdict in run_checks(load, found, rows, timeout_s):
            verdicts.append(verdict)
            if not as_json:
                print(f"{MARKS[verdict.level]} {verdict.what}: {verdict.text}", flush=True)
    is_ok = all(verdict.level != "problem" for verdict in verdicts)
    if as_json:
        print_json({"ok": is_ok, "checks": [asdict(v) for v in verdicts], "stages": [asdict(row) for row in rows]})
    elif rows:
        print_rows(rows, ["median ms"])
    if not is_ok:
        sys.exit(1)


def run_checks(load: Load, samples: Sequence[Sample], rows: list[StageRow], timeout_s: float) -> Iterator[Verdict]:
    """Load the handler, run every check, and append the times of its stages to `rows`."""
    observer = StageObserver()
    config = ServerConfig()
    worker, outcome = guarded_call(lambda: LocalWorker(load, observer), config.default_startup_timeout_s)
    if outcome.error is not None:
        yield Verdict("problem", "loads", outcome.reason)
        return
    yield Verdict("ok", "loads", f"{load.handler} in {outcome.seconds:.2f} s")
    if sentence := explain_training(worker.loaded.handler, worker.loaded.handle):
        yield Verdict("note", "training mode", sentence)
    caller = GuardedCaller(worker, timeout_s)
    yield from HandlerChecks(caller, samples, load.batch_size, config.max_response_bytes).run()
    rows.extend(time_stages(caller, observer, samples))
    guarded_call(worker.close, timeout_s)


def time_stages(caller: GuardedCaller, observer: StageObserver, samples: Sequence[Sample]) -> list[StageRow]:
    """The stages of the median of a few calls."""
    calls: list[CallProfile] = []
    deadline = time.monotonic() + TIMED_CALLS_S
    for sample in (samples[i % len(samples)] for i in range(TIMED_CALLS)):
        if caller.call([sample]).error is None:
            calls.append(observer.call)
        if time.monotonic() > deadline:
            break
    return stage_rows([median_call(calls)]) if calls else []


def read_samples(path: Path, content_type: str | None) -> list[Sample]:
    """One sample per file of a folder, or one for a single file."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a folder of request bodies with --samples")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".")
    if not files:
        raise ConfigError(f"{path} holds no files; add request bodies that the handler should answer")
    requests = [to_request(i, file, content_type) for i, file in enumerate(files)]
    return [Sample(f.name, r.headers[0][1], bytes(r.body)) for f, r in zip(files, requests, strict=True)]  # type: ignore[arg-type]
