"""Loops that cannot end, by their source alone. Without effects."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# What neither leaves a loop nor runs other code; anything else might: a call, an index, a division, an attribute.
HARMLESS = (
    ast.Pass,
    ast.Continue,
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.If,
    ast.While,
    ast.Constant,
    ast.Name,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.expr_context,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_endless_loop(source: str, line: int) -> int | None:
    """The line of a `while` around this line that cannot end; None if there is none that is sure to be one.

    It has no way out and calls nothing, and its condition is true or about local variables that it does not change.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    around = [node for node in ast.walk(tree) if spans(node, line)]
    functions = [node for node in around if isinstance(node, Function)]
    innermost = max(functions, key=lambda node: node.lineno, default=None)
    loops = [node for node in around if isinstance(node, ast.While)]
    return next((loop.lineno for loop in loops if innermost is not None and is_endless(loop, innermost)), None)


def spans(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def is_endless(loop: ast.While, function: Function) -> bool:
    if not all(isinstance(node, HARMLESS) for node in parts_of(loop)):
        return False
    if isinstance(loop.test, ast.Constant):
        return bool(loop.test.value)
    asked = names_in(loop.test)
    changed = {name for statement in loop.body for name in names_set_in(statement)}
    return bool(asked) and asked <= local_names(function) and not asked & changed


def parts_of(loop: ast.While) -> Iterator[ast.AST]:
    yield from ast.walk(loop.test)
    for statement in loop.body:
        yield from ast.walk(statement)


def names_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def names_set_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def local_names(function: Function) -> set[str]:
    """The variables of a function that nothing else can change; none if it shares some."""
    if any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(function)):
        return set()
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    return arguments | {name for statement in function.body for name in names_set_in(statement)}
