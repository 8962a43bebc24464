"""Loads torch.export programs. torch would run code from the file in several ways; they are closed here.

A program is still a program: a file from a stranger belongs behind `safe_weights`, which rejects the format.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from flambeau.errors import HandlerError
from flambeau.handlers.loaders.weights import rejected_class
from flambeau.wire.example_requests import Expression, of_shape

# torch makes Python source from names: no quotes, brackets, operators or line ends. Names of operators have dots,
# versions a plus.
_NAME = re.compile(r"[\w .:<>#/+-]*")
_WORD = re.compile(r"_?[A-Za-z]\w*|_\d*")  # not __import__
_SIZES = ("size", "stride", "storage_offset")
# Texts that never become source as they are: they are quoted, only shown, or checked elsewhere.
_FREE_TEXTS = ("as_string", "as_strings", "metadata", "expr_str", "guards_code")
_JSON_TEXTS = ("in_spec", "out_spec", "context")
_EXPRESSION_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Constant),
    *(ast.Tuple, ast.List, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_MAX_EXPRESSION = 10_000  # characters


class CodeFound(Exception):
    """A program would run code of its own; the text says where. Not a RuntimeError, which torch would catch."""


def load_exported(path: Path, device: torch.device, *, weights_only: bool = True) -> torch.nn.Module:
    """The module of a program; with `weights_only` a file with code of its own is an error."""
    if not weights_only:
        return _to_module(torch.export.load(str(path)), device)
    try:
        _check_members(path)
        with _without_code():
            program = torch.export.load(str(path))
        _check_example(program.example_inputs)
        return _to_module(program, device)
    except (CodeFound, pickle.UnpicklingError) as error:
        found = str(error) if isinstance(error, CodeFound) else rejected_class(error)
        raise HandlerError(
            f"{path.name} holds more than a program and its weights: {found}. Loading it would run code from the file. "
            "Export the model again, or, if you trust the file, put `weights_only: false` into its model-config.yaml"
        ) from None


def _to_module(program: torch.export.ExportedProgram, device: torch.device) -> torch.nn.Module:
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return program.module()


def example_of_program(module: torch.fx.GraphModule) -> Expression | None:
    """A request for one row of an exported program's only input; None if its shape is not known."""
    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        return None
    batch, *sizes = values[0].shape or (None,)
    if (isinstance(batch, int) and batch > 1) or not all(isinstance(size, int) for size in sizes):
        return None
    return of_shape(sizes, 0.5 if values[0].is_floating_point() else 0)


@contextmanager
def _without_code() -> Iterator[None]:
    """Close torch's ways to run code from members: pickles of any class, and expressions that sympy evaluates."""
    import sympy

    evaluate = sympy.sympify

    def sympify(value: Any, locals: Mapping[str, Any] | None = None, **options: Any) -> Any:
        if isinstance(value, str):
            check_expression(value, locals or {})
        return evaluate(value, locals=locals, **options)

    with (
        # torch's own switch for every torch.load, also where the caller asks for all classes.
        patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}),
        patch.object(pickle, "loads", _refuse_pickle),
        patch.object(sympy, "sympify", sympify),
    ):
        yield


def _refuse_pickle(*_: Any, **__: Any) -> NoReturn:
    raise CodeFound("a pickled Python object among its constants")


def check_expression(text: str, known: Mapping[str, Any]) -> None:
    """Raise CodeFound unless a text is arithmetic over symbols: sympy evaluates it as Python."""
    import sympy

    for node in _nodes_of(text):
        called = node.func if isinstance(node, ast.Call) else None
        is_plain = isinstance(node, _EXPRESSION_NODES) and (
            called is None or (isinstance(called, ast.Name) and _is_function(called.id, known, sympy))
        )
        if not is_plain:
            raise CodeFound(f"a shape that is not arithmetic, {text[:100]!r}")


def check_guard(text: str) -> None:
    """Raise CodeFound unless a text compares sizes of inputs, as in `L['x'].size()[0] >= 2`: torch runs it."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    for node in _nodes_of(text):
        called = node.func if isinstance(node, ast.Call) else None
        is_plain = isinstance(node, (*_EXPRESSION_NODES, ast.Subscript, ast.Attribute)) and (
            called is None or isinstance(called, ast.Attribute) or _name_of(called) in SYMPY_INTERP
        )
        if isinstance(node, ast.Attribute):
            is_plain = node.attr in _SIZES or (_name_of(node.value) == "math" and not node.attr.startswith("_"))
        if not is_plain:
            raise CodeFound(f"a guard that compares no sizes, {text[:100]!r}")


def _nodes_of(text: str) -> list[ast.AST]:
    """The nodes of an expression; texts in it are single words, as sympy evaluates these too."""
    if len(text) > _MAX_EXPRESSION:
        raise CodeFound(f"an expression of {len(text)} characters")
    try:
        nodes = [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        raise CodeFound(f"an expression that is not valid, {text[:100]!r}") from None
    for node in nodes:
        word = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else _name_of(node)
        if word is not None and not _WORD.fullmatch(word):
            raise CodeFound(f"an expression with the text {word[:100]!r}")
    return nodes


def _name_of(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_function(name: str, known: Mapping[str, Any], sympy: Any) -> bool:
    found = getattr(sympy, name, None)
    return name in known or (isinstance(found, type) and issubclass(found, sympy.Basic))


def _check_members(path: Path) -> None:
    """Check the documents of a program. torch's own reader reads them: another may see other members in the file."""
    with zipfile.ZipFile(path) as archive:
        if "serialized_exported_program.json" in archive.namelist():
            raise CodeFound("the format of torch before 2.8")
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        names = [name for name in reader.get_all_records() if name.endswith(".json") and name.startswith("models/")]
        documents = {name: json.loads(reader.get_record(name)) for name in names}
    except (RuntimeError, ValueError, RecursionError) as error:
        raise HandlerError(f"{path.name} looks like a torch.export program, but could not be read: {error}") from None
    for name, document in documents.items():
        check_names(document, name)


def check_names(document: Any, where: str) -> None:
    """Raise CodeFound unless all names in a program's document are plain."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and not _NAME.fullmatch(value):
            raise CodeFound(f"the name {value[:100]!r} in {where}")
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            for guard in value.get("guards_code") or ():
                check_guard(str(guard))
            waiting += value
            waiting += [_parsed(key, child) for key, child in value.items() if key not in _FREE_TEXTS]


def _parsed(key: str, value: Any) -> Any:
    """A value; a text that is JSON itself is parsed."""
    if key not in _JSON_TEXTS or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _check_example(example: Any) -> None:
    """torch compares inputs with texts of the example, and puts these and the keys into source as they are."""
    for path, leaf in pytree.tree_flatten_with_path(example)[0]:
        texts = [leaf, *(getattr(part, "key", None) for part in path)]
        for text in texts:
            if isinstance(text, str) and not _NAME.fullmatch(text):
                raise CodeFound(f"the text {text[:100]!r} in its example inputs")
