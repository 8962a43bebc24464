#!/usr/bin/env python3
"""Record README's session on a real server and draw it as docs/terminal.svg: `python scripts/terminal.py`."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "terminal.svg"
COLUMNS, LINE_HEIGHT, CHARACTER_WIDTH, MARGIN = 108, 19, 7.8, 16
READY = "is ready"
COLORS = {1: "#cf222e", 2: "#1a7f37", 3: "#9a6700", 5: "#8250df", 6: "#0969da"}  # by their ANSI numbers
PLAIN, DIM, PROMPT, PAPER, EDGE = "#1f2328", "#656d76", "#bc4c00", "#f6f8fa", "#d0d7de"


def handler_of_the_readme() -> str:
    found = re.search(r"```python\n(# shout\.py\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found, "README.md has no shout.py"
    return found[1]


def record() -> list[Text]:
    """The lines of the session: a server starts, answers and is asked about its models."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shout.py").write_text(handler_of_the_readme(), encoding="utf-8")
        server, output = start(["flambeau", "serve", "shout.py"], folder)
        try:
            lines = [prompt("flambeau serve shout.py"), *shown(read_until(output, READY))]
            request = re.search(r"(curl http\S+ .*)", read_until(output, "curl "))
            assert request, "the server has not printed a command"
            for command in (request[1].strip(), "flambeau models ls"):
                answer, reader = start(["sh", "-c", command], folder)
                lines += [Text(), prompt(command), *shown(read_all(reader))]
                answer.wait(60)
        finally:
            server.terminate()
            server.wait(60)
    return lines


def start(command: Sequence[str], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process on a terminal of its own, and what to read its output from."""
    leader, follower = pty.openpty()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=follower, stderr=follower)
    os.close(follower)
    return process, leader


def read_until(output: int, words: str) -> str:
    seen = ""
    while words not in seen or not seen.endswith("\n"):
        seen += os.read(output, 65536).decode(errors="replace")
    return seen


def read_all(output: int) -> str:
    seen = ""
    try:
        while data := os.read(output, 65536):
            seen += data.decode(errors="replace")
    except OSError:  # Linux: the other end is closed
        pass
    return seen


def prompt(command: str) -> Text:
    return Text.assemble(("$ ", Style(color=PROMPT, bold=True)), (command, Style(bold=True)))


def shown(output: str) -> list[Text]:
    """What stays on the screen: without log lines and without lines that the spinner has rewritten."""
    lines = [line.rsplit("\r", 1)[-1] for line in output.replace("\r\n", "\n").split("\n")]
    texts = [Text.from_ansi(re.sub(r"\x1b\[(?!\d*(;\d+)*m)[\d;?]*[A-Za-z]", "", line)) for line in lines]
    return [text for text in texts if text.plain.strip() and not re.match(r"\d{4}-\d\d-\d\dT|[⠀-⣿]", text.plain)]


def draw(lines: Sequence[Text]) -> str:
    rows = [row for line in lines for row in wrapped(line)]
    width = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN
    height = (len(rows) + 1) * LINE_HEIGHT + 2 * MARGIN
    body = "\n".join(row_element(row, MARGIN + (number + 2) * LINE_HEIGHT) for number, row in enumerate(rows))
    dots = "".join(f'<circle cx="{MARGIN + 6 + 16 * i}" cy="18" r="5" fill="{EDGE}"/>' for i in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        "<title>A server starts, answers a request and lists its models</title>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8" fill="{PAPER}" stroke="{EDGE}"/>\n'
        f'{dots}\n<g font-family="ui-monospace,Menlo,Consolas,monospace" font-size="13" fill="{PLAIN}">\n'
        f"{body}\n</g>\n</svg>\n"
    )


def wrapped(line: Text) -> list[Text]:
    return [*line.divide(range(COLUMNS, len(line), COLUMNS))] if len(line) > COLUMNS else [line]


def row_element(row: Text, y: float) -> str:
    spans = []
    for begin, end, style in pieces(row):
        color = DIM if style.dim else color_of(style)
        attributes = (f' fill="{color}"' if color else "") + (' font-weight="bold"' if style.bold else "")
        x = MARGIN + begin * CHARACTER_WIDTH
        spans.append(f'<tspan x="{x:g}"{attributes}>{escape(row.plain[begin:end])}</tspan>')
    return f'<text y="{y:g}" xml:space="preserve">{"".join(spans)}</text>'


def color_of(style: Style) -> str | None:
    if style.color is None:
        return None
    return style.color.name if style.color.number is None else COLORS.get(style.color.number)


def pieces(row: Text) -> list[tuple[int, int, Style]]:
    """The row in pieces of one style each."""
    edges = sorted({0, len(row), *(edge for span in row.spans for edge in (span.start, span.end))})
    found = []
    for begin, end in pairwise(edges):
        given = [span.style for span in row.spans if span.start <= begin < span.end]
        styles = [Style.parse(style) if isinstance(style, str) else style for style in given]
        found.append((begin, end, Style.combine([Style.null(), *styles])))
    return found


def main() -> None:
    PICTURE.write_text(draw(record()), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
