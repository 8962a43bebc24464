"""Output of the commands: tables for readers, JSON for programs, and the table of a handler's stages."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from flambeau.worker.stage_timings import CallProfile

DEFAULT_WIDTH = 160  # columns, if stderr is not a terminal


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_wrapped(text: str, indent: str = "", file: TextIO | None = None) -> None:
    """Print a paragraph; on a terminal, lines break between words."""
    if (file or sys.stdout).isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    print(text, file=file)


def show_progress(text: str = "") -> None:
    """Replace the line of progress on the terminal; without a text, remove it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, separated by two spaces."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A stage, its output, and its milliseconds in each of the shown calls."""

    name: str
    output: str
    times_ms: tuple[float, ...]


def median_call(calls: Sequence[CallProfile]) -> CallProfile:
    """The call of median duration; a real call, so that its stages add up."""
    return sorted(calls, key=lambda call: call.seconds)[(len(calls) - 1) // 2]


def stage_rows(calls: Sequence[CallProfile]) -> list[StageRow]:
    """The stages of the calls side by side, then the total; the outputs are those of the last call."""
    shown = calls[-1]
    rows = []
    for stage in shown.stages:
        times = tuple(sum(s.seconds for s in call.stages if s.name == stage.name) * 1000 for call in calls)
        name = stage.name if stage.calls == 1 else f"{stage.name} ×{stage.calls}"
        rows.append(StageRow(name=name, output=stage.output, times_ms=times))
    if rows:
        rest = tuple(call.seconds * 1000 - sum(row.times_ms[i] for row in rows) for i, call in enumerate(calls))
        rows.append(StageRow(name=shown.rest.name, output="", times_ms=rest))
    total = tuple(call.seconds * 1000 for call in calls)
    return [*rows, StageRow(name="handle", output=shown.rest.output, times_ms=total)]


def print_rows(rows: Sequence[StageRow], columns: Sequence[str]) -> None:
    """Print the table on stderr; rows with fewer times than columns have empty cells."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else DEFAULT_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("output", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = [f"{time:.2f}" for time in row.times_ms]
        style = "bold" if row.name == "handle" else None
        table.add_row(row.name, escape(row.output), *times, *[""] * (len(columns) - len(times)), style=style)
    console.print(table)
