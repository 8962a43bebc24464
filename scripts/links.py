#!/usr/bin/env python3
"""Check that the relative links of all Markdown files lead to a file, and their anchors to a heading."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
# README's links work on a package index too.
ABSOLUTE = re.compile(
    r"https://(?:github\.com/flambeau-serve/flambeau/(?:blob|tree)|raw\.githubusercontent\.com/flambeau-serve/flambeau)/main/"
)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in map("".join, LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))):
        path, _, anchor = link.partition("#")
        if own := ABSOLUTE.match(path):
            path = str(ROOT / path[own.end() :])
        elif "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link} does not exist")
    return broken


def main() -> None:
    broken = [line for page in pages() for line in broken_links(page)]
    print("\n".join(broken) or f"links of {len(pages())} pages: ok")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
