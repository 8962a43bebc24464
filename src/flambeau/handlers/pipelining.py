"""Whether a handler can prepare the next batch while it computes the current one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OURS = "flambeau.handlers."
_CHANGING = frozenset(
    {"append", "add", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}
)


@dataclass(slots=True)
class Touched:
    """The attributes of a handler that a method writes and reads, itself or through methods it calls."""

    written: dict[str, str] = field(default_factory=dict)  # attribute → where
    read: set[str] = field(default_factory=set)


def why_not(handler: Any) -> str | None:
    """Why `pipeline: true` would mix up the requests of this handler; None when it would not.

    `preprocess` of one batch runs beside `inference` and `postprocess` of another, on the same object. So what
    `preprocess` leaves on the object, another batch may find; and what the others leave there, it may find itself.
    """
    first = touched(type(handler), "preprocess")
    if first.written:
        name, where = next(iter(first.written.items()))
        return f"{where} keeps self.{name}, which the batch before it may still need; return it instead"
    if "context" in first.read:
        return "preprocess uses self.context, which belongs to the batch before it; read headers in postprocess"
    for stage in ("inference", "postprocess"):
        for name, where in touched(type(handler), stage).written.items():
            if name in first.read:
                return f"{where} changes self.{name}, which preprocess of the next batch reads at the same time"
    return None


def touched(handler_class: type[Any], method: str) -> Touched:
    """What a method of a user's class does to its object."""
    found, seen, waiting = Touched(), set(), [method]
    while waiting:
        name = waiting.pop()
        function = inspect.unwrap(getattr(handler_class, name, None) or _nothing)
        if name in seen or not inspect.isfunction(function) or (function.__module__ or "").startswith(OURS):
            continue
        seen.add(name)
        for kind, attribute, line in _uses_of_self(function):
            if kind == "write":
                found.written.setdefault(attribute, f"{name} (line {line})")
            else:
                found.read.add(attribute)
                waiting.append(attribute)
    return found


def _nothing() -> None:
    pass


def _uses_of_self(function: Any) -> Iterator[tuple[str, str, int]]:
    """Each ("write" or "read", attribute, line) of the function's first parameter."""
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return
    definition = tree.body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or not definition.args.args:
        return
    owner = definition.args.args[0].arg
    for node in ast.walk(definition):
        line = first_line + getattr(node, "lineno", 1) - 1
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
            yield ("read" if isinstance(node.ctx, ast.Load) else "write"), node.attr, line
        elif (changed := _changed_inside(node)) is not None and (attribute := _attribute_of(changed, owner)):
            yield "write", attribute, line


def _changed_inside(node: ast.AST) -> ast.expr | None:
    """What a statement changes without assigning to it: `x[…] = …`, `x.append(…)`."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        return node.func.value
    return None


def _attribute_of(node: ast.expr, owner: str) -> str | None:
    """The attribute of `owner` that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
            return node.attr
        node = node.value
    return None
