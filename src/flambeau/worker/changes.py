"""The Python files of a model folder: which have changed, and which modules came from them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

MAX_FILES, MAX_FOLDERS = 1000, 200
SKIPPED = ("__pycache__", "node_modules", "site-packages")
Stamp = tuple[int, int]  # time of the last change in ns, size


def stamps(folder: Path, others: Iterable[Path] = ()) -> dict[Path, Stamp]:
    """When each Python file below a folder was changed, the nearest ones first; and some other files."""
    found = {file: stamp for file in others if (stamp := stamp_of(file)) is not None}
    folders, seen = deque([folder]), 0
    while folders and seen < MAX_FOLDERS and len(found) < MAX_FILES:
        seen += 1
        try:
            entries = [*os.scandir(folders.popleft())]
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.name.endswith(".py") and (stamp := stamp_of(path)) is not None:
                found[path] = stamp
            elif not entry.name.startswith(".") and entry.name not in SKIPPED and entry.is_dir(follow_symlinks=False):
                folders.append(path)
    return found


def stamp_of(file: Path) -> Stamp | None:
    """When a file was changed; None when there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def differing(old: Mapping[Path, Stamp], new: Mapping[Path, Stamp]) -> set[Path]:
    """The files that came, went or changed."""
    return {file for file in old.keys() | new.keys() if old.get(file) != new.get(file)}


def modules_from(folder: Path) -> dict[str, Path]:
    """The loaded modules that came from a folder, by name."""
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    inside = f"{folder}{os.sep}"
    return {name: Path(file) for name, file in files.items() if isinstance(file, str) and file.startswith(inside)}


def dependents(modules: Mapping[str, Path], sources: Mapping[Path, str], changed: set[Path]) -> set[str]:
    """The modules that have changed, and those that import one of them, directly or not."""
    imports = {name: imported_by(sources.get(file, "")) for name, file in modules.items()}
    found = {name for name, file in modules.items() if file in changed}
    while True:
        more = {name for name, used in imports.items() if name not in found and any(map(used.__contains__, found))}
        if not more:
            return found
        found |= more


def imported_by(source: str) -> set[str]:
    """Every module a piece of code may import, with the packages around it; all names of `from x import y` count."""
    names: set[str] = set()
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError):
        return names
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            found = base + [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in found:
            parts = name.split(".")
            names.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return names


def forget(names: Iterable[str], changed: Iterable[Path]) -> None:
    """Let these modules be imported anew; bytecode of changed files, which is told by whole seconds only, goes too."""
    for name in names:
        sys.modules.pop(name, None)
    for file in changed:
        try:
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        except OSError:
            pass
    importlib.invalidate_caches()


def read_sources(files: Iterable[Path]) -> dict[Path, str]:
    """The text of each file that can be read."""
    found = {}
    for file in files:
        try:
            found[file] = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return found
