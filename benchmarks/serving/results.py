"""Turns records into a result: medians over the rounds, goals, and the file that keeps them."""

import itertools
import json
import re
import shutil
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from goals import GOALS, judge
from measure import Record
from peers import ask

REPOSITORY = Path(__file__).parents[2]

# Of these the worst round counts; of everything else the median.
WORST_COUNTS = {"errors", "bad_answers"}


def medians_of(records: Iterable[Record]) -> dict[str, dict[str, dict[str, float]]]:
    """peer → point → metric → the median of the rounds, with how many rounds there were and how many were noisy."""
    grouped: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if "point" in record:
            grouped[record["peer"], record["point"]].append(record)
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for (peer, point), rounds in grouped.items():
        metrics = {key for record in rounds for key, value in record.items() if _is_number(value) and key != "round"}
        summary: dict[str, float] = {}
        for metric in sorted(metrics):
            values = [record[metric] for record in rounds if _is_number(record.get(metric))]
            summary[metric] = max(values) if metric in WORST_COUNTS else round(statistics.median(values), 3)
        summary["measurements"] = len(rounds)
        summary["noisy"] = sum(bool(record.get("noisy")) for record in rounds)
        medians.setdefault(peer, {})[point] = summary
    return medians


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def disagreements(records: Iterable[Record]) -> list[str]:
    """The points at which servers did not give the same answer to the same body."""
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for record in records:
        if "answer" in record:
            answers[record["point"]].add(json.dumps(record["answer"], sort_keys=True))
    return [point for point, different in answers.items() if len(different) > 1]


def summarize(records: list[Record]) -> dict[str, Any]:
    """Everything that follows from the records."""
    medians = medians_of(records)
    return {
        "goals": [judge(goal, medians) for goal in GOALS],
        "disagreements": disagreements(records),
        "medians": medians,
        "records": records,
    }


def versions(python: Path, torchserve_venv: Path) -> dict[str, str | None]:
    """What was measured, and with what."""
    torchserve_python = torchserve_venv / "bin" / "python"
    return {
        "flambeau": ask(python, "import flambeau; print(flambeau.__version__)"),
        "commit": commit(),
        "torch": _distribution(python, "torch"),
        "torchserve": _distribution(torchserve_python, "torchserve"),
        "torchserve_torch": _distribution(torchserve_python, "torch"),
        "java": _says(["java", "-version"], r'version "([^"]+)"'),
        "wrk": _says(["wrk", "-v"], r"wrk \S*?(\d[\w.-]*)"),
    }


def _distribution(python: Path, name: str) -> str | None:
    return ask(python, f"import importlib.metadata as m; print(m.version({name!r}))")


def _says(command: list[str], pattern: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    output = subprocess.run(command, capture_output=True, text=True, timeout=30)
    found = re.search(pattern, output.stdout + output.stderr)
    return found[1] if found else None


def commit() -> str | None:
    """The commit checked out, read from the repository's own files."""
    git = REPOSITORY / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()[:12]
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0][:12] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None


def write(result: dict[str, Any], folder: Path) -> Path:
    """Saves a result under the day and minute it was made (UTC), never over another one."""
    folder.mkdir(parents=True, exist_ok=True)
    minute = f"{datetime.now(UTC):%Y-%m-%d-%H%M}"
    file = folder / f"{minute}-serving.json"
    for number in itertools.count(2):
        if not file.exists():
            break
        file = folder / f"{minute}-serving-{number}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file
