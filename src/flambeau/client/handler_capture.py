"""A handler that is defined in a script or a notebook → files that a worker process can load.

The source of the handler is written to a file, with whatever it refers to: imports, functions and classes defined
beside it, and the values of other variables, as literals or pickled.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import pickle
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from flambeau.errors import ConfigError

MODULE = "captured_{name}"
HANDLER = "handler.py"
VALUES = "values.pkl"
LITERALS = (int, float, complex, str, bytes, bool, type(None))
MAX_LITERAL = 10_000  # characters of a value in the source; larger ones are pickled
FUTURE = "from __future__ import annotations\n"

LOAD_VALUES = """

def _load_values():
    import pathlib
    import pickle

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if module in {modules!r} and name.partition(".")[0] in globals():
                found = globals()[name.partition(".")[0]]
                for part in name.split(".")[1:]:
                    found = getattr(found, part)
                return found
            return super().find_class(module, name)

    with (pathlib.Path(__file__).parent / {file!r}).open("rb") as stream:
        globals().update(Unpickler(stream).load())


_load_values()
"""


@dataclass(slots=True)
class Capture:
    """What a handler refers to, in the order in which the file needs it."""

    home: str  # the module that the handler is defined in
    imports: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def add(self, name: str, value: Any) -> None:
        """Add what a global name of the handler stands for."""
        if name in self.names:
            return
        self.names.add(name)
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, FunctionType | type) and self._is_defined_here(value):
            self.define(name, value)
        elif (found := importable(value)) is not None:
            module, attribute = found
            self.imports.append(f"from {module} import {attribute} as {name}")
        elif is_literal(value) and len(text := repr(value)) <= MAX_LITERAL:
            self.definitions.append(f"{name} = {text}\n")
        else:
            self._add_value(name, value)

    def define(self, name: str, value: Any) -> None:
        """Add the source of a function or class, after what it refers to."""
        self.names |= {name, value.__name__}
        source = source_of(value)
        needed, hinted = names_in(source)
        scope = scope_of(value)
        for other in needed:
            if other in scope:
                self.add(other, scope[other])
        for other in hinted - needed:  # only annotations: without them the handler works as well
            if other in scope:
                try:
                    self.add(other, scope[other])
                except ConfigError:
                    self.names.discard(other)
        self.definitions.append(source)
        if name != value.__name__:
            self.definitions.append(f"{name} = {value.__name__}\n")

    def _is_defined_here(self, value: Any) -> bool:
        return value.__module__ in (self.home, "__main__") or "<locals>" in value.__qualname__

    def _add_value(self, name: str, value: Any) -> None:
        for kind in {type(value), *(type(child) for child in getattr(value, "_modules", {}).values())}:
            if self._is_defined_here(kind):
                self.add(kind.__name__, kind)
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ConfigError(
                f"the handler uses the variable {name!r} of type {type(value).__name__}, which cannot be sent to a "
                f"worker process ({error}); create it in the handler's initialize, or write the handler to a file and "
                "serve that file"
            ) from None
        self.values[name] = value

    def text(self) -> str:
        parts = [FUTURE, *(f"{line}\n" for line in dict.fromkeys(self.imports))]
        parts += [f"\n\n{source}" for source in self.definitions]
        if self.values:
            parts.append(LOAD_VALUES.format(modules=sorted({self.home, "__main__"}), file=VALUES))
        return "".join(parts)


def write_handler(handler: Callable[..., Any], folder: Path) -> Path:
    """Write a handler and what it needs to files in `folder`; returns the file to serve."""
    check_handler(handler)
    capture = Capture(handler.__module__)
    capture.define(handler.__name__, handler)
    module = MODULE.format(name=handler.__name__.lower())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(capture.text(), encoding="utf-8")
    if capture.values:
        with (folder / VALUES).open("wb") as stream:
            pickle.dump(capture.values, stream)
    file = folder / HANDLER
    file.write_text(entry_of(handler, module), encoding="utf-8")
    return file


def check_handler(handler: Callable[..., Any]) -> None:
    if inspect.isclass(handler):
        missing = [name for name in ("initialize", "handle") if not hasattr(handler, name)]
        if missing:
            raise ConfigError(
                f"the class {handler.__name__} has no {' and no '.join(missing)}; "
                "a handler has initialize(context) and handle(data, context)"
            )
    elif not isinstance(handler, FunctionType) or handler.__name__ == "<lambda>":
        raise ConfigError(
            f"{handler!r} cannot be served; give a class, a function written with def, or the path of a handler, an "
            "archive or a model folder"
        )
    elif num_inputs(handler) not in (1, 2):
        raise ConfigError(
            f"the function {handler.__name__} takes {num_inputs(handler)} arguments; a handler takes (data, context), "
            "or one argument: the body of one request"
        )


def num_inputs(function: Callable[..., Any]) -> int:
    """How many arguments a function needs; two are those of a handler."""
    given = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [one for one in given if one.kind in kinds]
    required = [one for one in positional if one.default is inspect.Parameter.empty]
    return max(len(required), min(len(positional), 1))


def entry_of(handler: Callable[..., Any], module: str) -> str:
    """The file that names the handler. A function of one argument gets the body of each request."""
    name = handler.__name__
    if inspect.isclass(handler):
        return f"from {module} import {name}\n\n__all__ = [{name!r}]\n"
    if num_inputs(handler) == 2:
        return f"from {module} import {name} as handle\n\n__all__ = ['handle']\n"
    imports = f"from flambeau.worker.loader import per_request\nfrom {module} import {name}"
    return f"{imports}\n\nhandle = per_request({name})\n"


# ---- sources ----


def source_of(value: Any) -> str:
    """The source of a function or class at the left margin."""
    try:
        text = class_source(value) if inspect.isclass(value) else inspect.getsource(value)
    except (OSError, TypeError, SyntaxError):
        raise ConfigError(
            f"the source of {value.__qualname__} cannot be found; write it to a file and serve that file"
        ) from None
    return textwrap.dedent(text)


def class_source(value: type[Any]) -> str:
    """A class's source, found through its methods: a class of a notebook names no file."""
    functions = [function for function in functions_of(value) if function.__qualname__.startswith(value.__qualname__)]
    for function in functions:
        code = function.__code__
        text = "".join(linecache.getlines(code.co_filename))
        for node in ast.walk(ast.parse(text)) if text else ():
            if isinstance(node, ast.ClassDef) and node.name == value.__name__ and contains(node, code.co_firstlineno):
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(text.splitlines(keepends=True)[start - 1 : node.end_lineno])
    return inspect.getsource(value)


def contains(node: ast.ClassDef, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def functions_of(value: type[Any]) -> Iterator[FunctionType]:
    for member in vars(value).values():
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        inner = inner.fget if isinstance(inner, property) else inner
        if isinstance(inner, FunctionType):
            yield inspect.unwrap(inner)


def scope_of(value: Any) -> Mapping[str, Any]:
    """The names that a function or class can see: those of its module, and of functions around it."""
    functions = [*functions_of(value)] if inspect.isclass(value) else [inspect.unwrap(value)]
    module = sys.modules.get(value.__module__)
    scope = dict(functions[0].__globals__ if functions else vars(module) if module else {})
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                scope[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    scope.pop("__class__", None)
    return scope


def names_in(source: str) -> tuple[set[str], set[str]]:
    """The global names that a source needs when it runs, and those of its annotations."""
    tree = ast.parse(source)
    needed = {
        name for name in globals_of(symtable.symtable(FUTURE + source, "<handler>", "exec")) if not is_builtin(name)
    }
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign)]
    annotations += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    hinted = {
        node.id
        for annotation in annotations
        if annotation is not None
        for node in ast.walk(annotation)
        if isinstance(node, ast.Name) and not is_builtin(node.id)
    }
    return needed - {"annotations"}, hinted


def globals_of(table: symtable.SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from globals_of(child)


def is_builtin(name: str) -> bool:
    return hasattr(builtins, name) or (name.startswith("__") and name.endswith("__"))


def importable(value: Any) -> tuple[str, str] | None:
    """The module and the name that a value can be imported by in another process."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "." in name or module == "__main__":
        return None
    found = sys.modules.get(module)
    return (module, name) if found is not None and getattr(found, name, None) is value else None


def is_literal(value: Any) -> bool:
    """Whether `repr` of a value is its source."""
    if type(value) in (list, tuple, set):
        return all(map(is_literal, value)) and (type(value) is not set or bool(value))
    if type(value) is dict:
        return all(is_literal(key) and is_literal(item) for key, item in value.items())
    is_plain = type(value) in LITERALS
    return is_plain and (not isinstance(value, float) or value - value == 0)  # no nan, no infinity
