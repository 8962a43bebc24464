"""Where the time of a handler goes, as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.worker.stages import CallProfile

WIDE = 160  # columns, where nobody's terminal says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line: a stage, what came out of it, and its milliseconds in each call that is shown."""

    name: str
    output: str
    times_ms: tuple[float, ...]


def median_call(calls: Sequence[CallProfile]) -> CallProfile:
    """The call in the middle: a real one, so that its stages add up."""
    return sorted(calls, key=lambda call: call.seconds)[(len(calls) - 1) // 2]


def rows_of(calls: Sequence[CallProfile]) -> list[Row]:
    """The stages of these calls, side by side, then the whole."""
    shown = calls[-1]
    rows = []
    for stage in shown.stages:
        times = tuple(sum(s.seconds for s in call.stages if s.name == stage.name) * 1000 for call in calls)
        name = stage.name if stage.calls == 1 else f"{stage.name} ×{stage.calls}"
        rows.append(Row(name=name, output=stage.output, times_ms=times))
    if rows:
        rest = tuple(call.seconds * 1000 - sum(row.times_ms[i] for row in rows) for i, call in enumerate(calls))
        rows.append(Row(name=shown.rest.name, output="", times_ms=rest))
    whole = tuple(call.seconds * 1000 for call in calls)
    return [*rows, Row(name="handle", output=shown.rest.output, times_ms=whole)]


def print_rows(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print aligned columns on stderr; those of a call that a row is not about stay empty."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("what came out", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{time:.2f}" for time in row.times_ms]
        style = "bold" if row.name == "handle" else None
        table.add_row(row.name, escape(row.output), *times, *[""] * (len(columns) - len(times)), style=style)
    console.print(table)
