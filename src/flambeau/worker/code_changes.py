"""The Python files of a model folder: which have changed, and which modules came from them."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

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


SETUP = ("__new__", "__init__", "initialize")
Code = Mapping[str, str]  # where a piece of code stands → what it says, without comments and layout


def setup_code(sources: Mapping[str, str], kin: Iterable[str], seeds: Iterable[str], whole: Iterable[str] = ()) -> Code:
    """Every piece of these files that setting up can have run, as far as names tell; rather too much than too little.

    `kin` are the classes a handler is made of: of them, only methods count whose names are reached. Of any other class
    that is reached all counts, since its instances may live on. `seeds` are the names where setting up begins, and
    `whole` the files of which everything counts.
    """
    trees = {name: ast.parse(text) for name, text in sources.items()}
    kin, whole, reached = {*kin}, {*whole}, {*seeds}
    while True:
        pieces = [
            piece
            for name, tree in trees.items()
            for piece in pieces_of(name, tree, kin, reached, everything=name in whole)
        ]
        names = {used for _, node in pieces for used in names_in(node)}
        if names <= reached:
            return joined((label, ast.dump(node)) for label, node in pieces)
        reached |= names


def joined(pieces: Iterable[tuple[str, str]]) -> Code:
    """What is said under each label, in order."""
    code: dict[str, str] = {}
    for label, text in pieces:
        code[label] = f"{code[label]}\n{text}" if label in code else text
    return code


def pieces_of(
    file: str, tree: ast.Module, kin: set[str], reached: set[str], *, everything: bool
) -> Iterator[tuple[str, ast.AST]]:
    """The statements of a file that count, each with a label."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in kin:
            yield from members_of(file, node, reached)
        elif everything or counts(node, reached):
            yield label_of(file, node), node


def members_of(file: str, node: ast.ClassDef, reached: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """Of a handler's own class: its head, and what is reached of its body."""
    head = copy.copy(node)
    head.body = []
    yield f"{file}: class {node.name}", head
    for member in node.body:
        if counts(member, reached):
            yield label_of(file, member), member


def counts(node: ast.stmt, reached: set[str]) -> bool:
    """Whether a statement takes part: what it defines is reached, or it does something of its own."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return False
    defined = names_defined(node)
    return bool(defined & reached) if defined is not None else True


def names_defined(node: ast.stmt) -> set[str] | None:
    """The names a statement only defines; None when it does more, or may."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        case ast.Assign():
            targets = node.targets
        case ast.AnnAssign() | ast.AugAssign():
            targets = [node.target]
        case ast.Pass():
            return set()
        case _:
            return None
    found = [inner for target in targets for inner in ast.walk(target)]
    if any(isinstance(inner, (ast.Attribute, ast.Subscript)) for inner in found):
        return None
    return {inner.id for inner in found if isinstance(inner, ast.Name)}


def names_in(node: ast.AST) -> set[str]:
    """Every name and attribute that a piece of code mentions."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def label_of(file: str, node: ast.stmt) -> str:
    """What to call a statement: by the names it defines, if it only defines."""
    return f"{file}: {', '.join(sorted(names_defined(node) or ())) or 'top-level code'}"


def first_change(old: Code, new: Code) -> str | None:
    """The first piece of code that is not the same; None where all is."""
    return next((label for label in [*old, *new] if old.get(label) != new.get(label)), None)


def inherited_names(handler_class: type[Any]) -> set[str]:
    """The names that setting up reaches through a class and its bases, wherever they are defined."""
    reached = {*SETUP}
    while True:
        found = {
            name
            for base in handler_class.__mro__
            for method in reached
            if isinstance(code := getattr(vars(base).get(method), "__code__", None), CodeType)
            for name in code_names(code)
        }
        if found <= reached:
            return reached
        reached |= found


def code_names(code: CodeType) -> Iterator[str]:
    """The names that compiled code mentions, in functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_names(constant)
