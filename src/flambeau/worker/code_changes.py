"""Code changes: which files and modules of a model have changed, and whether its setup code has."""

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
Stamp = tuple[int, int]  # modification time in ns, size in bytes


def stamps(folder: Path, others: Iterable[Path] = ()) -> dict[Path, Stamp]:
    """The stamps of the Python files below a folder, the nearest ones first, and of some other files."""
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
    """None if there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def differing(old: Mapping[Path, Stamp], new: Mapping[Path, Stamp]) -> set[Path]:
    """The files that were added, removed or changed."""
    return {file for file in old.keys() | new.keys() if old.get(file) != new.get(file)}


def modules_from(folder: Path) -> dict[str, Path]:
    """The loaded modules whose files are in a folder, by name."""
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    inside = f"{folder}{os.sep}"
    return {name: Path(file) for name, file in files.items() if isinstance(file, str) and file.startswith(inside)}


def dependents(modules: Mapping[str, Path], sources: Mapping[Path, str], changed: set[Path]) -> set[str]:
    """The changed modules, and those that import one of them, directly or indirectly."""
    imports = {name: imported_by(sources.get(file, "")) for name, file in modules.items()}
    found = {name for name, file in modules.items() if file in changed}
    while True:
        more = {name for name, used in imports.items() if name not in found and any(map(used.__contains__, found))}
        if not more:
            return found
        found |= more


def imported_by(source: str) -> set[str]:
    """Every module that code may import, with its parent packages; `y` of `from x import y` may be one."""
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
    """Unload modules so that they are imported again.

    The bytecode of changed files is deleted: Python compares its time stamp in whole seconds only.
    """
    for name in names:
        sys.modules.pop(name, None)
    for file in changed:
        try:
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        except OSError:
            pass
    importlib.invalidate_caches()


def read_sources(files: Iterable[Path]) -> dict[Path, str]:
    found = {}
    for file in files:
        try:
            found[file] = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return found


SETUP = ("__new__", "__init__", "initialize")
Code = Mapping[str, str]  # place of a statement → its syntax tree as text, without comments and layout


def setup_code(sources: Mapping[str, str], kin: Iterable[str], seeds: Iterable[str], whole: Iterable[str] = ()) -> Code:
    """The statements that setting up a handler may have run, judged by names; rather too many than too few.

    `kin` are the names of the handler's class and its bases: of these, only methods that are reached count. A reached
    class of any other name counts as a whole, since its instances may be kept. `seeds` are the names where setup
    begins. All statements of the files in `whole` count.
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
    code: dict[str, str] = {}
    for label, text in pieces:
        code[label] = f"{code[label]}\n{text}" if label in code else text
    return code


def pieces_of(
    file: str, tree: ast.Module, kin: set[str], reached: set[str], *, everything: bool
) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in kin:
            yield from members_of(file, node, reached)
        elif everything or counts(node, reached):
            yield label_of(file, node), node


def members_of(file: str, node: ast.ClassDef, reached: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """The head of a handler's own class, and the members that are reached."""
    head = copy.copy(node)
    head.body = []
    yield f"{file}: class {node.name}", head
    for member in node.body:
        if counts(member, reached):
            yield label_of(file, member), member


def counts(node: ast.stmt, reached: set[str]) -> bool:
    """Whether a statement takes part in setup: a name it defines is reached, or it does more than define."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return False
    defined = names_defined(node)
    return bool(defined & reached) if defined is not None else True


def names_defined(node: ast.stmt) -> set[str] | None:
    """The names that a statement defines; None if it does, or may do, more than that."""
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
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def label_of(file: str, node: ast.stmt) -> str:
    return f"{file}: {', '.join(sorted(names_defined(node) or ())) or 'top-level code'}"


def first_change(old: Code, new: Code) -> str | None:
    """The label of the first statement that differs; None if none does."""
    return next((label for label in [*old, *new] if old.get(label) != new.get(label)), None)


def inherited_names(handler_class: type[Any]) -> set[str]:
    """The names that setup reaches through the methods of a class and its bases, wherever they are defined."""
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
    """The names in compiled code and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_names(constant)
