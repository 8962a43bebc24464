"""What the source of a handler says about its class, without running it."""

from __future__ import annotations

import ast

from flambeau.errors import suggest

METHODS = ("initialize", "handle")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def missing_method(source: bytes) -> str:
    """Why the only class of a module cannot be a handler; empty if it can, or if only running it would tell."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    plain = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    classes = [node for node in statements if isinstance(node, ast.ClassDef)]
    if len(classes) != 1 or not all(isinstance(node, (ast.ClassDef, *plain)) for node in statements):
        return ""
    return explain(classes[0])


def explain(node: ast.ClassDef) -> str:
    is_open = node.bases or node.keywords or node.decorator_list or not all(map(is_known, node.body))
    if is_open:
        return ""
    names = [each.name for each in node.body if isinstance(each, FUNCTIONS)]
    for method in METHODS:
        if method not in names:
            near = suggest(method, names, cutoff=0.8)
            hint = f"; rename {near}, if that is meant" if near else ""
            return f"class {node.name} has no method {method}, so it cannot be loaded{hint}"
    return ""


def is_known(node: ast.stmt) -> bool:
    """Whether a statement of a class body adds no method but by `def`."""
    return isinstance(node, (*FUNCTIONS, ast.Expr, ast.Pass))
