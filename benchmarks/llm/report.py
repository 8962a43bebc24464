"""Turns a result of `run.py` into tables and a plot: `report.py RESULT.json [--docs docs/benchmarks.md]`."""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from page import OURS, THEIRS, Bar, bars, report_main, table

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
            "![Tokens per second of the shipped model](llm.svg)",
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
    given = [
        Bar(title, value, THEIRS if title.startswith("transformers") else OURS)
        for title, value in rates(result).items()
    ]
    return bars("Tokens per second of the shipped model on two cores", given)


if __name__ == "__main__":
    report_main(__doc__, "llm", markdown, plot)
