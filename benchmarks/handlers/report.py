"""Turns a result of `run.py` into tables and a plot: `report.py RESULT.json [--docs docs/benchmarks.md]`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- handlers: begin -->", "<!-- handlers: end -->"
PLOT = "handlers.svg"
FORMATS = {"safetensors": "safetensors", "state_dict": "state dict", "torchscript": "TorchScript (copied)"}

Result = Mapping[str, Any]


def ratio_rows(result: Result) -> list[tuple[str, str, float, float, float]]:
    """What is compared, with what; both figures, and their ratio."""
    experiments = result["experiments"]
    tax, pipeline, compiled = experiments["tax"], experiments["pipeline"], experiments["compile"]
    return [
        (
            "one worker, JPEG + network, images/s",
            "a bare loop over the handler",
            tax["served_per_s"],
            tax["bare_per_s"],
            tax["served_to_bare"],
        ),
        (
            "four workers on two cores, images/s",
            "two workers",
            tax["four_workers_per_s"],
            tax["two_workers_per_s"],
            tax["four_to_two"],
        ),
        (
            "`pipeline: true`, batches of 4, images/s",
            "without it",
            pipeline["pipelined_per_s"],
            pipeline["plain_per_s"],
            pipeline["gain"],
        ),
        (
            "`torch.compile`, batches of 8, requests/s",
            "eager",
            compiled["compiled_per_s"],
            compiled["eager_per_s"],
            compiled["gain"],
        ),
        (
            "second start of a compiled model, s",
            "the first",
            compiled["from_cache_s"],
            compiled["first_compilation_s"],
            compiled["from_cache_s"] / compiled["first_compilation_s"],
        ),
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def markdown(result: Result) -> str:
    """The whole report."""
    machine, memory = result["machine"], result["experiments"]["weights"]
    ratios = [
        [what, f"{ours:.1f}", other, f"{theirs:.1f}", f"{ratio:.2f}"]
        for what, other, ours, theirs, ratio in ratio_rows(result)
    ]
    rows = [
        [name, *(f"{memory[f'{key}_{workers}_workers']['pss_mb']:,}" for workers in (1, 4))]
        for key, name in FORMATS.items()
    ]
    return "\n\n".join(
        [
            f"![Memory of one and four workers]({PLOT})",
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
    bars = [
        (f"{name}, {workers} worker{'s' if workers > 1 else ''}", memory[f"{key}_{workers}_workers"]["pss_mb"], key)
        for key, name in FORMATS.items()
        for workers in (1, 4)
    ]
    left, width, top, step = 240, 480, 44, 24
    longest = max(value for _, value, _ in bars)
    bottom = top + step * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{bottom + 12}" viewBox="0 0 800 {bottom + 12}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="16" y="22" font-size="14">Memory of the workers of a 400 MB model (PSS, MB)</text>',
    ]
    for index, (title, value, key) in enumerate(bars):
        y, color = top + index * step, "#c0562b" if key == "torchscript" else "#2f7d4f"
        length = round(width * value / longest, 1)
        parts.append(f'<text x="{left - 12}" y="{y + 12}" text-anchor="end">{title}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length}" height="16" fill="{color}"/>')
        parts.append(f'<text x="{left + length + 6}" y="{y + 12}">{value:,}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--docs", type=Path, help="a page to update, such as docs/benchmarks.md")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    report = markdown(result)
    print(report)
    if arguments.docs:
        page = arguments.docs.read_text()
        before, _, rest = page.partition(BEGIN)
        arguments.docs.write_text(f"{before}{BEGIN}\n\n{report}\n\n{END}{rest.partition(END)[2]}")
        (arguments.docs.parent / PLOT).write_text(plot(result))


if __name__ == "__main__":
    main()
