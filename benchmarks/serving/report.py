"""Turns a result of `run.py` into Markdown tables, and with `--docs` into a page and a plot."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from goals import OURS, RIVAL
from page import report_main, table

# Near zero when all is well, so their ratios mean nothing.
NOT_PLOTTED = {"growth_mb", "bad_answers", "slow_delay_ms"}

Row = Mapping[str, Any]
Result = Mapping[str, Any]


def number(value: float | None) -> str:
    """About three significant figures."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{min(3, max(0, 2 - math.floor(math.log10(abs(value)))))}f}"


def promise(goal: Row) -> str:
    """A goal in a few words."""
    sign = "≥" if goal["sense"] == "at least" else "≤"
    unit = "×" if goal["against"] else goal["unit"]
    return f"{sign} {goal['limit']:g} {unit}".strip()


def mark(result: Result, peer: str, point: str) -> str:
    """An asterisk where the machine was disturbed, and the errors if there were any."""
    point_medians = result["medians"].get(peer, {}).get(point, {})
    errors = point_medians.get("errors", 0)
    return ("\\*" if point_medians.get("noisy") else "") + (f" ({errors:,} errors)" if errors else "")


def goal_row(result: Result, goal: Row) -> list[str]:
    rival = goal["against"] or RIVAL
    theirs = number(goal["rival"]) + mark(result, rival, goal["point"])
    return [
        ", ".join(filter(None, (goal["title"], goal["unit"]))),
        promise(goal),
        number(goal["flambeau"]) + mark(result, OURS, goal["point"]),
        theirs,
        "–" if goal["ratio"] is None else f"{goal['ratio']:.2f}",
        {True: "yes", False: "**no**", None: "not measured"}[goal["met"]],
    ]


def point_rows(result: Result) -> list[list[str]]:
    """Every loaded point of every peer, side by side."""
    points = list(dict.fromkeys(point for points in result["medians"].values() for point in points))
    rows = []
    for point in points:
        for peer, measured in result["medians"].items():
            medians = measured.get(point, {})
            if "rps" in medians:
                keys = ("rps", "p50_ms", "p90_ms", "p99_ms", "server_cores", "client_cores")
                figures = [number(medians.get(key)) for key in keys]
                figures[0] += mark(result, peer, point)
                rows.append([point, peer, *figures])
    return rows


def conditions(result: Result) -> str:
    """Where, when and with what, in a few lines."""
    machine, versions = result["machine"], result["versions"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, {machine['kernel']}, Python {machine['python']}; {known}.",
        f"\n    {result['command']}\n",
        "Values are medians over the rounds. An asterisk marks a point where, in at least one round, other processes "
        "or the host took more than a tenth of a core.",
    ]
    if not result["finished"]:
        lines.append("The run was interrupted, so some points have fewer rounds.")
    if result["disagreements"]:
        lines.append(f"**Servers gave different answers at: {', '.join(result['disagreements'])}.**")
    failures = {f"{record['peer']} {record['case']}" for record in result["records"] if "failure" in record}
    if failures:
        lines.append(f"**Could not be measured in at least one round: {', '.join(sorted(failures))}.**")
    return "\n".join(lines)


def markdown(result: Result) -> str:
    """The whole report."""
    head = ["", "goal", "Flambeau", "TorchServe, tuned", "ratio", "met"]
    point_head = ["point", "server", "requests/s", "p50 ms", "p90 ms", "p99 ms", "server cores", "client cores"]
    return "\n\n".join(
        [
            "![Ratios to TorchServe](benchmarks.svg)",
            conditions(result),
            table(head, [goal_row(result, goal) for goal in result["goals"]]),
            table(point_head, point_rows(result)),
        ]
    )


def plot(result: Result) -> str:
    """A bar for each ratio to TorchServe, on a logarithmic scale that grows to the right as Flambeau does better."""
    bars = []
    for goal in result["goals"]:
        if not goal["ratio"] or goal["metric"] in NOT_PLOTTED:
            continue
        limit = goal["limit"] if goal["against"] else None
        is_less_better = goal["sense"] == "at most"
        bars.append(
            Bar(
                title=goal["title"],
                times_better=1 / goal["ratio"] if is_less_better else goal["ratio"],
                goal=1 / limit if limit and is_less_better else limit,
                is_met=goal["met"],
            )
        )
    return draw(bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of the plot; a goal in seconds or megabytes has no place on its scale."""

    title: str
    times_better: float
    goal: float | None
    is_met: bool


def draw(bars: list[Bar]) -> str:
    """The bars as SVG."""
    left, right, top, step = 310, 760, 50, 24
    powers = [math.log2(value) for bar in bars for value in (bar.times_better, bar.goal) if value]
    low, high = math.floor(min([-0.5, *powers])), math.ceil(max([1.0, *powers]))

    def x(value: float) -> float:
        return round(left + (math.log2(value) - low) / (high - low) * (right - left), 1)

    bottom = top + step * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="840" height="{bottom + 30}" '
        f'viewBox="0 0 840 {bottom + 30}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="16" y="22" font-size="14">Times better than TorchServe, tuned (a tick marks the goal)</text>',
    ]
    for power in range(low, high + 1):
        at, shade = x(2.0**power), "#444" if power == 0 else "#ddd"
        parts.append(f'<line x1="{at}" y1="{top - 8}" x2="{at}" y2="{bottom}" stroke="{shade}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{2.0**power:g}×</text>')
    for index, bar in enumerate(bars):
        y = top + index * step
        start, end = sorted((x(1), x(bar.times_better)))
        color = "#2f7d4f" if bar.is_met else "#c0562b"
        parts.append(f'<text x="{left - 12}" y="{y + 12}" text-anchor="end">{escape(bar.title)}</text>')
        parts.append(f'<rect x="{start}" y="{y}" width="{end - start:.1f}" height="16" fill="{color}"/>')
        parts.append(f'<text x="{end + 6}" y="{y + 12}">{bar.times_better:.2f}</text>')
        if bar.goal:
            at = x(bar.goal)
            parts.append(f'<line x1="{at}" y1="{y - 3}" x2="{at}" y2="{y + 19}" stroke="black" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    report_main(__doc__, "benchmarks", markdown, plot)
