"""`flambeau check`: checks whether a handler is ready to serve."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from flambeau.cli.output import StageRow, median_call, print_json, print_rows, stage_rows
from flambeau.cli.run import example_bodies, open_model, to_request
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
BLOCKING_S = 0.25  # shorter than in a server: here nothing else delays the event loop
TIMED_CALLS_S = 1.0


def check(
    path: Path, samples: Path | None, content_type: str | None, *, batch_size: int, timeout_s: float, as_json: bool
) -> None:
    """Print a verdict per check; exit with status 1 if one of them is a problem."""
    found = read_samples(samples, content_type) if samples is not None else ()
    verdicts, rows = [], list[StageRow]()
    with WarningCollector() as warnings, open_model(path, batch_size=batch_size) as load:
        for verdict in run_checks(load, found, rows, timeout_s, warnings):
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


class WarningCollector(logging.Handler):
    """Keeps what the server would log about the model, until `close`: malformed bodies are part of the checks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger("flambeau")
        self._texts: list[str] = []
        self._seen: set[str] = set()
        self.is_open = True

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.is_open and text not in self._seen:
            self._seen.add(text)
            self._texts.append(text)

    def take(self) -> Iterator[Verdict]:
        """The warnings since the last call."""
        texts, self._texts = self._texts, []
        for text in texts:
            yield Verdict("note", "warning", text)

    def __enter__(self) -> WarningCollector:
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True


def run_checks(
    load: Load, samples: Sequence[Sample], rows: list[StageRow], timeout_s: float, warnings: WarningCollector
) -> Iterator[Verdict]:
    """Load the handler, run every check, and append the times of its stages to `rows`."""
    observer = StageObserver()
    config = ServerConfig()
    worker, outcome = guarded_call(
        lambda: LocalWorker(load, observer, blocking_s=BLOCKING_S), config.default_startup_timeout_s
    )
    yield from warnings.take()
    if outcome.error is not None:
        yield Verdict("problem", "loads", outcome.reason)
        return
    yield Verdict("ok", "loads", f"{load.handler} in {outcome.seconds:.2f} s")
    if sentence := explain_training(worker.loaded.handler, worker.loaded.handle):
        yield Verdict("note", "training mode", sentence)
    if not samples:
        samples = [Sample("example", "application/json", body) for body in example_bodies(worker)]
    if not samples:
        yield Verdict("problem", "samples", "none: give a folder with --samples, or set `example = …` in the handler")
        return
    caller = GuardedCaller(worker, timeout_s)
    last_good = "mixed sizes" if load.batch_size > 1 else "batch"
    for verdict in HandlerChecks(caller, samples, load.batch_size, config.max_response_bytes).run():
        yield verdict
        yield from warnings.take()
        # Good requests come first; what is logged about malformed ones is no finding.
        warnings.is_open = warnings.is_open and verdict.what != last_good
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
