"""The result of a run as JSON, and docs/reliability.md with its plot from that JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scorecard import RESULTS, ROOT
from scorecard.case import Check, Outcome, Scale, State
from scorecard.probes import LIVEZ_P99_MS

sys.path.append(str(ROOT / "benchmarks" / "serving"))

from machine import describe
from page import LIMIT, OURS, THEIRS, Bar, bars, table

PAGE, PLOT = ROOT / "docs" / "reliability.md", ROOT / "docs" / "reliability.svg"
GROUPS = {
    "faults": "Faults",
    "clients": "Hostile clients",
    "access": "Access",
    "load": "Load",
    "fuzzing": "Fuzzing",
}
LATENCY = "/livez p99"
MARKS: dict[State, str] = {"kept": "✓", "broken": "✗", "not run": "–"}


def result_of(outcomes: Sequence[Outcome], scale: Scale, load: float) -> dict[str, Any]:
    """The document that is kept: what was measured, when, on which commit and machine."""
    machine = describe()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit(),
        "machine": {name: machine[name] for name in ("cpu", "cores", "memory_gib", "kernel", "python")},
        "load_before": round(load, 1),
        "scale": {"chaos_s": scale.chaos_s, "fuzz_s": scale.fuzz_s, "seed": scale.seed},
        "outcomes": [outcome.to_dict() for outcome in outcomes],
    }


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{name} with changes" if git("status", "--porcelain", "--", "src", "scorecard/*.py") else name


def save(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    day, _, rest = str((result.get("again") or [result])[-1]["date"]).partition(" ")
    file = folder / f"{day}-{rest[:5].replace(':', '')}.json"
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return file


def newest_result(folder: Path = RESULTS) -> Path | None:
    return max(folder.glob("*.json"), default=None)


def updated(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """An earlier result with the outcomes of some cases that were run again, and when that was."""
    new = {outcome["name"]: outcome for outcome in later["outcomes"]}
    again = {"date": later["date"], "commit": later["commit"], "cases": [*new]}
    outcomes = [new.pop(outcome["name"], outcome) for outcome in earlier["outcomes"]] + [*new.values()]
    return {**earlier, "again": [*earlier.get("again", []), again], "outcomes": outcomes}


def write_page(result: dict[str, Any], source: Path) -> None:
    PAGE.write_text(to_page(result, source.name))
    PLOT.write_text(to_plot(result))


def to_page(result: dict[str, Any], source: str) -> str:
    """docs/reliability.md as a whole: nothing in it is written by hand."""
    outcomes = [Outcome.from_dict(document) for document in result["outcomes"]]
    ran = [outcome for outcome in outcomes if outcome.state != "not run"]
    kept = [outcome for outcome in ran if outcome.is_kept]
    machine = result["machine"]
    parts = [
        "# Reliability",
        "`make scorecard` attacks real server processes and writes this page: what is promised, what was measured. "
        "Nothing on it is written by hand. [Security](security.md) says what is promised and what is not.",
        f"**{len(kept)} of {len(ran)} promises kept** on commit `{result['commit']}`, {result['date']}, on "
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']:g} GiB, "
        f"{machine['kernel'].split('-')[0]}, Python {machine['python']}. The load before the run was "
        f"{result['load_before']:g}. The figures are in [{source}](../scorecard/results/{source}).",
        *again(result),
        summary(outcomes),
        "![The slowest hundredth of /livez answers beside each attack](reliability.svg)",
        "Each case starts servers of its own, on free ports. `/livez p99` is the time that 99 of 100 answers of "
        "`/livez` need, asked every 10 ms on a connection of its own beside the attack: it shows how long everyone "
        "else waits. A late answer counts for all requests that would have come meanwhile. "
        "✓ kept, ✗ broken, – not run here. Values without a bound are information.",
    ]
    for group, title in GROUPS.items():
        members = [outcome for outcome in outcomes if outcome.group == group]
        if members:
            parts += [f"## {title}", table(["", "case", "promise", "measured"], [row(one) for one in members])]
    parts += ["## Run it", RUN_IT]
    return "\n\n".join(map(filled, parts)) + "\n"


def filled(part: str) -> str:
    """Running text in lines of 140 characters."""
    is_text = "\n" not in part and not part.startswith(("#", "!"))
    return textwrap.fill(part, 140, break_long_words=False, break_on_hyphens=False) if is_text else part


def again(result: dict[str, Any]) -> list[str]:
    """Which cases were run later than the others, and on which commit."""
    return [
        f"Run again on commit `{one['commit']}`, {one['date']}: {', '.join(one['cases'])}."
        for one in result.get("again", [])
    ]


RUN_IT = """\
```sh
make scorecard                                        # all cases, about 15 minutes on two cores; writes this page
python -m scorecard --quick                           # the subset that `make test` runs; writes nothing
python -m scorecard --only "at once" --chaos-s 600    # cases by a part of their name; ten minutes of chaos
python -m scorecard --only fuzzing --fuzz-s 600 --seed 7
python -m scorecard --only snapshot --update          # run some again, and update the newest result and this page
python -m scorecard.fuzzing.atheris_search archives   # guided by coverage, where atheris is installed
```

Inputs that break a target are saved in `scorecard/corpus`, and every test run replays them. A run from the same seed
tries the same inputs in the same order."""


def summary(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for group, title in GROUPS.items():
        states = [outcome.state for outcome in outcomes if outcome.group == group]
        if states:
            rows.append([title, str(len(states)), *(str(states.count(state)) for state in MARKS)])
    states = [outcome.state for outcome in outcomes]
    rows.append(["**all**", str(len(states)), *(str(states.count(state)) for state in MARKS)])
    return table(["group", "cases", "kept", "broken", "not run"], rows)


def row(outcome: Outcome) -> list[str]:
    measured = "<br>".join(escaped(line) for line in lines_of(outcome))
    return [MARKS[outcome.state], escaped(outcome.name), escaped(outcome.promise), measured]


def lines_of(outcome: Outcome) -> list[str]:
    """What was measured: broken bounds first, then the others."""
    checks = sorted(outcome.checks, key=lambda check: (check.holds, not check.bound))
    lines = [told(check) for check in checks]
    if outcome.trouble:
        lines.insert(0, outcome.trouble if outcome.state == "not run" else f"**{outcome.trouble}**")
    return lines


def told(check: Check) -> str:
    value = f"{check.value:,}" if isinstance(check.value, int | float) else str(check.value)
    unit = f" {check.unit}" if check.unit else ""
    bound = f" ({check.bound})" if check.bound else ""
    text = f"{check.name} {value}{unit}{bound}"
    return text if check.holds else f"**{text}**"


def escaped(text: str) -> str:
    """Text in a cell of a table; angle brackets would be tags."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def to_plot(result: dict[str, Any]) -> str:
    found = []
    for document in result["outcomes"]:
        outcome = Outcome.from_dict(document)
        for check in outcome.checks:
            if check.name == LATENCY and isinstance(check.value, int | float):
                found.append(Bar(short(outcome.name), max(check.value, 0.1), OURS if check.holds else THEIRS))
    found.sort(key=lambda bar: -bar.value)
    return bars(
        "p99 of /livez beside each attack, in milliseconds (lower is better)",
        [Bar("limit", LIVEZ_P99_MS, LIMIT), *found],
    )


def short(name: str) -> str:
    return name if len(name) <= 36 else name[:35] + "…"


def load_average() -> float:
    return os.getloadavg()[0]
