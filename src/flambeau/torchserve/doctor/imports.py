"""The imports of a model's Python files, and whether they resolve; no code is run."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {  # import name → distribution name
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from module import name`, or `import module`."""

    module: str
    name: str | None
    line: int
    is_optional: bool  # inside a `try`


def imports_of(source: str) -> Iterator[Import]:
    """Every absolute import of a file; raises SyntaxError for a file that is not Python."""
    yield from _walk(ast.parse(source), is_optional=False)


def _walk(node: ast.AST, *, is_optional: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, child.lineno, is_optional) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield from (Import(child.module, alias.name, child.lineno, is_optional) for alias in child.names)
        else:
            yield from _walk(child, is_optional=is_optional or isinstance(child, ast.Try | ast.TryStar))


def is_installed(module: str) -> bool:
    """Whether a top-level package or module is installed."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def missing_name(module: str, name: str | None, home: Path) -> str | None:
    """The part of `from module import name` that the packages below `home` lack; None if it resolves."""
    path = home.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return module
    if name in (None, "*") or (path / f"{name}.py").is_file() or (path / f"{name}").is_dir():
        return None
    return None if name in names_in(file.read_text()) else f"{module}.{name}"


def names_in(source: str) -> set[str]:
    """The names that a module binds at its top level."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        names |= set(_bound_by(node))
    return names


def _bound_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
    elif isinstance(node, ast.If | ast.Try):
        branches: list[ast.stmt] = [*node.body, *node.orelse]
        if isinstance(node, ast.Try):
            branches += [*node.finalbody, *(part for handler in node.handlers for part in handler.body)]
        for part in branches:
            yield from _bound_by(part)


def own_modules(files: Mapping[str, bytes]) -> set[str]:
    """The top-level modules that the model contains."""
    return {Path(name).parts[0].removesuffix(".py") for name in files if name.endswith(".py")}
