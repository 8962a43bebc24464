"""The site's hooks for mkdocs: pages from outside of docs/, and links that lead to pages or to the repository.

Links in Markdown are written for GitHub and package indexes. In the site, a link to a file that is a page becomes a
link to that page, and any other file of the repository a link to GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/flambeau-serve/flambeau"
PREFIXES = (
    f"{REPOSITORY}/blob/main/",
    f"{REPOSITORY}/tree/main/",
    "https://raw.githubusercontent.com/flambeau-serve/flambeau/main/",
)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def sources() -> dict[str, str]:
    """The pages from outside of docs/: their path in the repository, and the one in the site."""
    examples = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/README.md"))
    return {
        "README.md": "index.md",
        "ARCHITECTURE.md": "architecture.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        **{path: f"examples/{path.split('/')[1]}.md" for path in examples},
    }


def rewrite(link: str, source: str, places: dict[str, str]) -> str:
    """A link of the file `source`, for the site; `places` maps files of the repository to files of the site."""
    path, hash_sign, anchor = link.partition("#")
    prefix = next((prefix for prefix in PREFIXES if path.startswith(prefix)), None)
    if not path or ("://" in path and prefix is None) or path.startswith("mailto:"):
        return link
    folder = posixpath.dirname(source)
    file = path.removeprefix(prefix) if prefix else posixpath.normpath(posixpath.join(folder, path))
    if file in places:
        return posixpath.relpath(places[file], posixpath.dirname(places[source]) or ".") + hash_sign + anchor
    return f"{REPOSITORY}/blob/main/{file}{hash_sign}{anchor}"


def on_files(files: Files, config: Any) -> Files:
    for source, place in sources().items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    outside = sources()
    places = {**{f"docs/{file.src_uri}": file.src_uri for file in files}, **outside}
    source = next((path for path, place in outside.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)  # odd parts are code
    for number in range(0, len(parts), 2):
        parts[number] = LINK.sub(lambda found: rewrite(found[1], source, places), parts[number])
    return "".join(parts)
