"""Turns a result of `run.py` into tables and a plot: `report.py RESULT.json [--docs docs/benchmarks.md]`."""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- llm: begin -->", "<!-- llm: end -->"
PLOT = "llm.svg"
NAMES = {
    ("transformers", "one"): "transformers.generate, one stream",
    ("plain", "one"): "one stream",
    ("lookup", "one"): "one stream, look-up",
    ("draft", "one"): "one stream, draft model",
    ("plain", "many"): "32 streams",
    ("draft", "many"): "32 streams, draft model",
}

Result = Mapping[str, Any]


def rates(result: Result) -> dict[str, float]:
    """Tokens per second of each subject, medians over the rounds."""
    return {
        name: statistics.median(r["tokens_per_s"][subject][size] for r in result["rounds"])
        for (subject, size), name in NAMES.items()
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def markdown(result: Result) -> str:
    """The whole report."""
    machine, goals = result["machine"], result["goals"]
    ratios = [
        [name, f"{value:.2f}", f"{goals[name]:g}" if name in goals else "", verdict(value, goals.get(name))]
        for name, value in result["medians"].items()
    ]
    accepted = statistics.median(r["tokens_per_s"]["draft"]["accepted"] for r in result["rounds"])
    return "\n\n".join(
        [
            f"![Tokens per second of the shipped model]({PLOT})",
            f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, torch "
            f"{result['versions']['torch']}, {result['threads']} threads; medians of {len(result['rounds'])} rounds, "
            "in each of which all subjects took their turn; ratios are taken within a round.",
            f"    {result['command']}",
            table(["", "ratio", "goal", ""], ratios),
            f"Of the drafted tokens {accepted:.0%} were accepted. Through HTTP the first token of a stream came "
            f"{result['http']['difference_ms']:.1f} ms later than from the engine alone "
            f"({result['http']['http_ms']:.1f} against {result['http']['engine_ms']:.1f} ms, medians).",
            table(["tokens/s", ""], [[name, f"{rate:,.0f}"] for name, rate in rates(result).items()]),
        ]
    )


def verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else "met" if value >= goal else "**missed**"


def plot(result: Result) -> str:
    """Bars of tokens per second, as SVG."""
    bars = rates(result)
    left, width, top, step = 250, 450, 44, 24
    longest, bottom = max(bars.values()), top + step * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{bottom + 12}" viewBox="0 0 800 {bottom + 12}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="16" y="22" font-size="14">Tokens per second of the shipped model on two cores</text>',
    ]
    for index, (title, value) in enumerate(bars.items()):
        y, color = top + index * step, "#c0562b" if title.startswith("transformers") else "#2f7d4f"
        length = round(width * value / longest, 1)
        parts.append(f'<text x="{left - 12}" y="{y + 12}" text-anchor="end">{title}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length}" height="16" fill="{color}"/>')
        parts.append(f'<text x="{left + length + 6}" y="{y + 12}">{value:,.0f}</text>')
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
