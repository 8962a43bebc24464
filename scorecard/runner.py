"""Runs cases, each in a process of its own: one that hangs or crashes is a result, not the end of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from scorecard import ROOT
from scorecard.case import Case, Check, NotHere, Outcome, Scale, Stage, State, Value
from scorecard.probes import MARK, is_alive, is_ours, wait_for


def run_cases(cases: Sequence[Case], scale: Scale, on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
    """Run cases one after another; every process that they start carries a mark."""
    os.environ[MARK] = uuid.uuid4().hex
    outcomes = []
    for case in cases:
        outcome = run_apart(case, scale)
        on_outcome(outcome)
        outcomes.append(outcome)
    return outcomes


def run_apart(case: Case, scale: Scale) -> Outcome:
    """Run a case in a process of its own, and look for processes that it leaves behind."""
    limit_s = case.limit_s + (scale.chaos_s if case.group == "load" else 0) + 30
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scorecard-", ignore_cleanup_errors=True) as name:
        file = Path(name) / "outcome.json"
        words = [sys.executable, "-m", "scorecard", "--case", case.name, "--out", str(file), "--folder", name]
        words += ["--scale", json.dumps(asdict(scale))]
        process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            end_group(process)
        if file.exists():
            outcome = Outcome.from_dict(json.loads(file.read_text()))
        else:
            trouble = f"no result after {limit_s:g} s" if process.returncode == -signal.SIGKILL else "it crashed"
            outcome = outcome_of(case, "broken", time.monotonic() - began, trouble=trouble)
        return with_leftovers(outcome)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of a case with its group, which it leads."""
    if process.pid > 1 and os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def with_leftovers(outcome: Outcome) -> Outcome:
    """Processes that a case leaves behind break it; they are killed one by one."""
    if wait_for(lambda: not marked_processes(), 5) is not None:
        return outcome
    left = marked_processes()
    for pid in left:
        if pid > 1 and is_ours(pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    check = Check("processes left behind", len(left), "", "= 0", False)
    return replace(outcome, checks=[*outcome.checks, check], state="broken" if outcome.is_kept else outcome.state)


def marked_processes() -> list[int]:
    """Processes of this run besides this one, which set the mark after it had started."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in pids if pid not in (1, os.getpid()) and is_ours(pid) and is_alive(pid)]


def run_here(case: Case, scale: Scale, folder: Path) -> Outcome:
    """Run a case in this process."""
    stage = Stage(folder, scale)
    began = time.monotonic()
    trouble = ""
    is_here = True
    try:
        case.run(stage)
    except NotHere as error:
        is_here, trouble = False, str(error)
    except Exception as error:
        trouble = str(f"{type(error).__name__}: {error}".split("\n", 1)[0])
        print("".join(traceback.format_exception(error))[-6000:], file=sys.stderr)
    try:
        stage.close()
    except Exception as error:
        trouble = trouble or str(f"while stopping: {type(error).__name__}: {error}".split("\n", 1)[0])
    is_kept = not trouble and all(check.holds for check in stage.checks)
    state: State = "not run" if not is_here else "kept" if is_kept else "broken"
    checks = [replace(check, value=shortened(check.value, folder)) for check in stage.checks]
    return outcome_of(case, state, time.monotonic() - began, checks, str(shortened(trouble, folder)))


def shortened(value: Value, folder: Path | None = None) -> Value:
    """A text without the folders of this machine, on one line."""
    if not isinstance(value, str):
        return value
    if folder is not None:
        value = value.replace(str(folder), "…")
    value = " ".join(value.replace(str(ROOT), ".").replace(sys.prefix, "…").split())
    return value if len(value) <= 400 else value[:397] + "…"


def outcome_of(
    case: Case, state: State, seconds: float, checks: list[Check] | None = None, trouble: str = ""
) -> Outcome:
    return Outcome(
        name=case.name,
        group=case.group,
        promise=case.promise,
        state=state,
        seconds=round(seconds, 1),
        checks=checks or [],
        trouble=trouble,
    )
