"""Checks by source whether a handler's stages may run concurrently (`pipeline: true`)."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OURS = "flambeau."
_MUTATING = frozenset(
    {"append", "add", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}
)


@dataclass(slots=True)
class AttributeUses:
    """The attributes that a method and the methods it calls write and read."""

    written: dict[str, str] = field(default_factory=dict)  # attribute → method and line
    read: set[str] = field(default_factory=set)


def find_shared_state(handler: Any) -> str | None:
    """The reason why `pipeline: true` would mix up requests of this handler; None if it would not.

    `preprocess` of one batch runs at the same time as `inference` and `postprocess` of another, on the same object.
    So no stage may write an attribute that a concurrent stage of another batch reads.
    """
    first = find_uses(type(handler), "preprocess")
    if first.written:
        name, where = next(iter(first.written.items()))
        return f"{where} changes self.{name}, which the previous batch may still need; return it instead"
    if "context" in first.read:
        return "preprocess uses self.context, which belongs to the previous batch; read headers in postprocess"
    for stage in ("inference", "postprocess"):
        for name, where in find_uses(type(handler), stage).written.items():
            if name in first.read:
                return f"{where} changes self.{name}, which preprocess of the next batch reads at the same time"
    return None


def find_uses(handler_class: type[Any], method: str) -> AttributeUses:
    """The uses in a method and in the methods it calls, in all base classes.

    Writes in our own classes are known to be harmless, but our methods call methods that a user may override.
    """
    found, seen, waiting = AttributeUses(), set(), [method]
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
    """Each function of that name in a class and its bases; `super()` may call any of them."""
    for base in handler_class.__mro__:
        value = vars(base).get(name)
        if callable(value) and inspect.isfunction(function := inspect.unwrap(value)):
            yield function


def _uses_of_self(function: Any) -> Iterator[tuple[str, str, int]]:
    """Yield ("write" or "read", attribute, line) for each use of the function's first parameter."""
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        yield "write", "attributes that cannot be checked, as its source is not available", 0
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
        elif (changed := _mutated_object(node)) is not None and (attribute := _attribute_of(changed, owner)):
            yield "write", attribute, line


def _is_owner(node: ast.expr, owner: str) -> bool:
    """Whether an expression is `self` or `super()`."""
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id == owner)


def _mutated_object(node: ast.AST) -> ast.expr | None:
    """The object that a statement changes in place: x of `x[…] = …` and `x.append(…)`."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATING:
        return node.func.value
    return None


def _attribute_of(node: ast.expr, owner: str) -> str | None:
    """The attribute of `owner` at the start of an expression: a of `self.a.b[0]`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
            return node.attr
        node = node.value
    return None
