"""Parts of a report: Markdown tables, SVG bar charts, and the replacement of a section of a page."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

OURS, THEIRS, LIMIT = "#2f7d4f", "#c0562b", "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a plot."""

    title: str
    value: float
    color: str = OURS


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def bars(title: str, given: Sequence[Bar]) -> str:
    """Bars from zero, as SVG."""
    left, width, top, step = 250, 450, 44, 24
    longest, bottom = max(bar.value for bar in given), top + step * len(given)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{bottom + 12}" viewBox="0 0 800 {bottom + 12}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="22" font-size="14">{escape(title)}</text>',
    ]
    for index, bar in enumerate(given):
        y, length = top + index * step, round(width * bar.value / longest, 1)
        parts.append(f'<text x="{left - 12}" y="{y + 12}" text-anchor="end">{escape(bar.title)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length}" height="16" fill="{bar.color}"/>')
        parts.append(f'<text x="{left + length + 6}" y="{y + 12}">{bar.value:,.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def update(page: Path, name: str, report: str, picture: str) -> None:
    """Replace what is between the markers of a name, and the plot of that name beside the page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{page} lacks the markers {begin} and {end}")
    before, _, rest = text.partition(begin)
    page.write_text(f"{before}{begin}\n\n{report}\n\n{end}{rest.partition(end)[2]}")
    (page.parent / f"{name}.svg").write_text(picture)


def report_main(
    description: str | None,
    name: str,
    markdown: Callable[[Any], str],
    plot: Callable[[Any], str],
    *,
    many: bool = False,
) -> None:
    """The command of a report: print it, and with `--docs` put it on a page. With `many`, it is of several results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("result", type=Path, nargs="+" if many else None)
    parser.add_argument("--docs", type=Path, help="a page to update, such as docs/benchmarks.md")
    arguments = parser.parse_args()
    files = arguments.result if many else [arguments.result]
    results = [json.loads(file.read_text()) for file in files]
    given = results if many else results[0]
    report = markdown(given)
    print(report)
    if arguments.docs:
        update(arguments.docs, name, report, plot(given))
