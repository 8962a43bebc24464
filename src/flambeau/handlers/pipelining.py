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
    """What a method does to its object, in every class that has a version of it, itself or through what it calls.

    What our own classes write is known to be harmless; but they call methods that a user may have replaced.
    """
    found, seen, waiting = Touched(), set(), [method]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for function in versions_of(handler_class, name):
            is_ours = (function.__module__ or "").startswith(OURS)
            for kind, attribute, line in _uses_of_self(function):
                if kind == "read":
                    waiting.append(attribute)
                    if not (is_ours and attribute == "context"):
                        found.read.add(attribute)
                elif not is_ours:
                    found.written.setdefault(attribute, f"{name} (line {line})")
    return found


def versions_of(handler_class: type[Any], name: str) -> Iterator[Any]:
    """Each function of that name among a class and its bases: `super()` may lead to any of them."""
    for base in handler_class.__mro__:
        value = vars(base).get(name)
        if callable(value) and inspect.isfunction(function := inspect.unwrap(value)):
            yield function


def _uses_of_self(function: Any) -> Iterator[tuple[str, str, int]]:
    """Each ("write" or "read", attribute, line) of the function's first parameter."""
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        yield "write", "what its source would tell, if it could be read", 0
        return
    definition = tree.body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or not definition.args.args:
        return
    owner = definition.args.args[0].arg
    for node in ast.walk(definition):
        line = first_line + getattr(node, "lineno", 1) - 1
        if isinstance(node, ast.Attribute) and _is_owner(node.value, owner):
            yield ("read" if isinstance(node.ctx, ast.Load) else "write"), node.attr, line
            if node.attr == "__dict__":
                yield "write", node.attr, line
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "vars"):
            if node.args and _is_owner(node.args[0], owner):
                yield "write", f"__dict__ through {node.func.id}()", line
        elif (changed := _changed_inside(node)) is not None and (attribute := _attribute_of(changed, owner)):
            yield "write", attribute, line


def _is_owner(node: ast.expr, owner: str) -> bool:
    """Whether an expression is the object itself, as such or through `super()`."""
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id == owner)


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
