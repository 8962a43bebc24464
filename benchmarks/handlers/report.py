"""Turns a result of `run.py` into tables and a plot: `report.py RESULT.json [--docs docs/benchmarks.md]`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from page import OURS, THEIRS, Bar, bars, report_main, table

FORMATS = {"safetensors": "safetensors", "state_dict": "state dict", "torchscript": "TorchScript (copied)"}

Result = Mapping[str, Any]


def ratio_rows(result: Result) -> list[tuple[str, str, float, float]]:
    """What is compared, with what, and both figures."""
    experiments = result["experiments"]
    tax, pipeline, compiled = experiments["tax"], experiments["pipeline"], experiments["compile"]
    return [
        (
            "one worker, JPEG + network, images/s",
            "a bare loop over the handler",
            tax["served_per_s"],
            tax["bare_per_s"],
        ),
        (
            "four workers on two cores, images/s",
            "two workers",
            tax["four_workers_per_s"],
            tax["two_workers_per_s"],
        ),
        (
            "`pipeline: true`, batches of 4, images/s",
            "without it",
            pipeline["pipelined_per_s"],
            pipeline["plain_per_s"],
        ),
        (
            "`torch.compile`, batches of 8, requests/s",
            "eager",
            compiled["compiled_per_s"],
            compiled["eager_per_s"],
        ),
        (
            "second start of a compiled model, s",
            "the first",
            compiled["from_cache_s"],
            compiled["first_compilation_s"],
        ),
    ]


def markdown(result: Result) -> str:
    """The whole report."""
    machine, memory = result["machine"], result["experiments"]["weights"]
    ratios = [
        [what, f"{ours:.1f}", other, f"{theirs:.1f}", f"{ours / theirs:.2f}"]
        for what, other, ours, theirs in ratio_rows(result)
    ]
    rows = [
        [name, *(f"{memory[f'{key}_{workers}_workers']['pss_mb']:,}" for workers in (1, 4))]
        for key, name in FORMATS.items()
    ]
    return "\n\n".join(
        [
            "![Memory of one and four workers](handlers.svg)",
            f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, torch {result['torch']}; "
            "medians of alternating turns in one run.",
            f"    {result['command']}",
            table(["", "", "against", "", "ratio"], ratios),
            "Resident memory of the workers of a 400 MB model, each page counted once (PSS), in MB:",
            table(["weights", "1 worker", "4 workers"], rows),
        ]
    )


def plot(result: Result) -> str:
    """Bars of memory, as SVG."""
    memory = result["experiments"]["weights"]
    given = [
        Bar(
            f"{name}, {workers} worker{'s' if workers > 1 else ''}",
            memory[f"{key}_{workers}_workers"]["pss_mb"],
            THEIRS if key == "torchscript" else OURS,
        )
        for key, name in FORMATS.items()
        for workers in (1, 4)
    ]
    return bars("Memory of the workers of a 400 MB model (PSS, MB)", given)


if __name__ == "__main__":
    report_main(__doc__, "handlers", markdown, plot)
