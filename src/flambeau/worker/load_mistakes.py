"""Mistakes that the load of a model reveals: failed imports, missing files, wrong signatures, misspelt hooks."""

from __future__ import annotations

import inspect
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from flambeau.archive.packages import EXTRAS, install_line
from flambeau.errors import suggest
from flambeau.worker.code_mistakes import IMPORTS
from flambeau.worker.code_places import (
    code_of,
    definition,
    first_line,
    frames_of,
    is_own,
    shorten,
    source_line,
    with_place,
)
from flambeau.worker.context import Context

SIGNATURES = {
    "handle": "handle(self, data, context), or a function handle(data, context)",
    "initialize": "initialize(self, context)",
    "preprocess": "preprocess(self, data)",
    "inference": "inference(self, data)",
    "postprocess": "postprocess(self, data)",
}
HOOKS = (*SIGNATURES, "explain_handle", "get_insights", "describe_handle")
CALL = re.compile(r"([\w.]+)\(\) (?:takes|missing|got)")
ABSTRACT = re.compile(r"instantiate abstract class (\w+)")
MAX_SHOWN = 8


def find_context(error: BaseException) -> Context | None:
    """The context among the variables of the frames that an exception passed."""
    for frame in frames_of(error):
        for value in frame.f_locals.values():
            if isinstance(value, Context):
                return value
    return None


# ---- code that cannot be imported ----


def explain_syntax(error: BaseException) -> str:
    if not isinstance(error, SyntaxError) or not error.filename or not is_own(error.filename):
        return ""
    column = f", column {error.offset}" if error.offset else ""
    text = f", in `{shorten(error.text)}`" if error.text and error.text.strip() else ""
    where = f"{os.path.basename(error.filename)}:{error.lineno}{column}"
    return f"{type(error).__name__}: {error.msg} ({where}){text}. Correct this line, or the one before it"


def explain_import(error: BaseException) -> str:
    """A module, or a name of one, that an import of the author's code does not find."""
    if not isinstance(error, ImportError) or not source_line(error):
        return ""
    if "relative import" in str(error):
        return (
            f"{with_place(error)}: the files of a model are modules of their own, and no package. "
            "Write `from helper import …` without the dot"
        )
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        line = install_line([module], EXTRAS.get(module, ""))
        return (
            f"{with_place(error)}: it is not installed and not in the model's folder. If it is a file of yours, put it "
            f"beside the handler (torch-model-archiver: --extra-files). If it is a package, install it: {line}; or "
            "name it in the archive's requirements.txt, with --install-dependencies (torchserve: "
            "install_py_dep_per_model=true)"
        )
    return explain_name(error)


def explain_name(error: ImportError) -> str:
    """`from helper import name`, where the author's helper.py has no such name."""
    module = sys.modules.get(error.name or "")
    if not error.path or not is_own(error.path) or wanted_name(error) in IMPORTS:
        return explain_library_name(error, module)
    file, name = os.path.basename(error.path), str(getattr(error, "name_from", "") or wanted_name(error))
    what = f"ImportError: {file} has no {name!r} ({source_line(error)})"
    if module is None or is_circular(error, module):
        return (
            f"{what}, because the two files import each other. Move what both need into a third file, or import it "
            "inside the function that uses it"
        )
    names = names_in(module)
    near = suggest(name, names)
    return f"{what}; it defines {shown(names)}" + (f". Did you mean {near}?" if near else ". Correct the name")


def explain_library_name(error: ImportError, module: ModuleType | None) -> str:
    """`from package import name`, where an installed package has no such name."""
    name = wanted_name(error)
    if module is None or not re.search("cannot import name", str(error)):
        return ""
    what = f"ImportError: {module.__name__} has no {name!r} ({source_line(error)})"
    if line := IMPORTS.get(name):
        return f"{what}. Write `{line}`"
    if near := suggest(name, [n for n in vars(module) if not n.startswith("_")]):
        return f"{what}. Did you mean {near}?"
    package = module.__name__.partition(".")[0]
    if package in sys.stdlib_module_names:
        return (
            f"{what}. Correct the name, or use the version of Python that has it; this is {platform.python_version()}"
        )
    version = getattr(sys.modules.get(package), "__version__", "")
    found = f"; this is {version}" if version else ""
    return f"{what}. Correct the name, or install the version of {package} that has it{found}"


def wanted_name(error: ImportError) -> str:
    """The name in `cannot import name 'clean' from 'helper'`; Python 3.11 has it in the message only."""
    found = re.search(r"cannot import name '(\w+)'", str(error))
    return found[1] if found else "such name"


def is_circular(error: ImportError, module: ModuleType) -> bool:
    """Whether the module that lacks the name is still being imported: its own code is among the callers."""
    return any(f.f_globals is vars(module) for f in frames_of(error)) or "circular" in str(error)


def names_in(module: ModuleType) -> list[str]:
    """The names that a module defines itself."""
    return [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]


def shown(names: Iterable[str]) -> str:
    found = [*names]
    return (", ".join(found[:MAX_SHOWN]) or "nothing") + (", …" if len(found) > MAX_SHOWN else "")


# ---- calls with the wrong arguments ----


def explain_signature(error: BaseException) -> str:
    found = CALL.search(str(error)) if isinstance(error, TypeError) else None
    if not found:
        return ""
    owner, _, name = found[1].rpartition(".")
    if owner == "Context":
        signature = inspect.signature(getattr(Context, name))
        arguments = ", ".join(str(p) for p in [*signature.parameters.values()][1:])
        return f"{with_place(error)}. Call it as context.{name}({re.sub(r': [^,=]+', '', arguments)})"
    function = find_function(owner, name)
    place = source_line(error) or definition(function)
    text = f"{first_line(error)}{f' ({place})' if place else ''}"
    if name == "__init__" and function is not None and not source_line(error):
        return f"{text}. The server calls {owner}() without arguments; take what it needs in initialize(self, context)"
    if name in SIGNATURES:
        return f"{text}. The server calls {SIGNATURES[name]}; define it with these arguments"
    return ""


def find_function(owner: str, name: str) -> Any:
    """The author's function or method of that name, in any module that is loaded; None if there is none."""
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType) and is_own(vars(module).get("__file__") or "<"):
            holder = getattr(module, owner, None) if owner else module
            if holder is not None and (function := getattr(holder, name, None)) is not None:
                return function
    return None


def explain_abstract(error: BaseException) -> str:
    found = ABSTRACT.search(str(error)) if isinstance(error, TypeError) else None
    return f"{with_place(error)}. Define these methods in {found[1]}, or remove @abstractmethod" if found else ""


def explain_first_call(error: BaseException) -> str:
    """A function is a handler that is called once without data, to initialize."""
    for frame in frames_of(error):
        code = frame.f_code
        if code.co_name != "handle" or not is_own(code.co_filename) or code.co_argcount != 2:
            continue
        data, context = (frame.f_locals.get(name, frame) for name in code.co_varnames[:2])
        if data is None and isinstance(context, Context):
            return (
                f"{with_place(error)}: the function is called once with data=None when the model is loaded. "
                "Begin with `if data is None: return`"
            )
    return ""


# ---- files ----


def explain_file(error: BaseException) -> str:
    """A file that is not where the author's code looks for it."""
    context = find_context(error)
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str) or context is None:
        return ""
    folder, path = Path(context.system_properties["model_dir"]), Path(error.filename)
    if not source_line(error):
        return ""
    join = f'os.path.join(context.system_properties["model_dir"], "{path.name}")'
    if (folder / path.name).exists():
        return f"{with_place(error)}: the model's folder has {path.name}. Open {join}"
    where = "" if path.is_absolute() else f" below {os.getcwd()}, where the worker runs"
    return (
        f"{with_place(error)}: there is no such file{where}. Put it into the model's folder (torch-model-archiver: "
        f"--extra-files), and open {join}"
    )


def explain_shadowing(folder: Path) -> Iterator[str]:
    """Files of a model with the name of another module: imports may find either, or never the other one."""
    for file in sorted(folder.glob("*.py")):
        if file.stem in sys.stdlib_module_names:
            yield (
                f"{file.name} in the model's folder has the name of a module of Python's standard library: an import "
                "may find either. Rename it"
            )
        elif is_package(file.stem):
            yield (
                f"{file.name} in the model's folder has the name of an installed package: `import {file.stem}` finds "
                "the file instead of the package. Rename it"
            )


def is_package(name: str) -> bool:
    """Whether a package or module of that name is installed, wherever the model's own files are."""
    folders = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    spec = PathFinder.find_spec(name, folders)
    return spec is not None and spec.origin is not None


def explain_own_module(error: BaseException) -> str:
    """`torch.zeros`, where the model's folder has a torch.py."""
    module = error.obj if isinstance(error, AttributeError) else None
    if not isinstance(module, ModuleType) or not is_own(file := vars(module).get("__file__") or "<"):
        return ""
    if module.__name__ not in sys.stdlib_module_names and not is_package(module.__name__):
        return ""
    return (
        f"{with_place(error)}: `{module.__name__}` is the model's own {os.path.basename(file)} here, and not the "
        "installed package. Rename the file"
    )


# ---- pretrained models ----


def explain_pretrained(error: BaseException) -> str:
    """`from_pretrained` of transformers, for a folder that lacks what it reads, or a name that is not on the disk."""
    if not isinstance(error, (OSError, ValueError)) or not source_line(error):
        return ""
    for frame in frames_of(error):
        wanted = frame.f_locals.get("pretrained_model_name_or_path")
        if frame.f_code.co_name != "from_pretrained" or not isinstance(wanted, (str, os.PathLike)):
            continue
        kind = frame.f_locals.get("cls")
        what = f"{getattr(kind, '__name__', 'from_pretrained')}.from_pretrained"
        if not os.path.isdir(wanted):
            return (
                f"{with_place(error)}: {what} looks for a folder or a model of the hub called {os.fspath(wanted)!r}. "
                'Pack the folder, and name it: os.path.join(context.system_properties["model_dir"], "…")'
            )
        names = shown(sorted(os.listdir(wanted)))
        return (
            f"{with_place(error)}: the folder that {what} reads has {names}. Write all of its files there with "
            "save_pretrained(…), those of the tokenizer too, and pack them (torch-model-archiver: --extra-files)"
        )
    return ""


# ---- names of methods ----


def explain_hooks(handler: type[Any]) -> Iterator[str]:
    """Methods whose names nearly are those that the server calls, while those are not the author's."""
    methods = {name: value for name, value in vars(handler).items() if inspect.isfunction(value)}
    used = {name for method in methods.values() for name in method.__code__.co_names}
    own_hooks = {hook for hook in HOOKS if definition(getattr(handler, hook, None))}
    for name, method in methods.items():
        if name in HOOKS or name.startswith("_") or name in used or not (place := definition(method)):
            continue
        plain = name.lower().replace("_", "").replace("initialis", "initializ")
        near = suggest(plain, [hook.replace("_", "") for hook in HOOKS], cutoff=0.82)
        hook = next((hook for hook in HOOKS if hook.replace("_", "") == near), None)
        if hook is not None and hook not in own_hooks:
            yield (
                f"{handler.__name__}.{name} ({place}) is never called: the server knows {hook}. "
                f"Rename it to {hook}, if that is meant"
            )


def explain_missing_method(handler: type[Any], method: str) -> str:
    """What to do about a handler class without `handle` or `initialize`."""
    place = definition(next(filter(inspect.isfunction, vars(handler).values()), None))
    file = place.rpartition(":")[0]
    names = [name for name, value in vars(handler).items() if inspect.isfunction(value)]
    text = f"{handler.__name__}{f' in {file}' if file else ''} has {shown(names)}"
    if hints := [*explain_hooks(handler)]:
        return f"{text}. {' '.join(hints)}"
    arguments = "self, context" if method == "initialize" else "self, data, context"
    return f"{text}. Define {method}({arguments}), or build on BaseHandler, which has it"


def explain_classes(module: ModuleType, classes: Iterable[type[Any]]) -> str:
    """What to do about a module without a handler class, or with several."""
    file = os.path.basename(module.__file__ or module.__name__)
    found = [*classes]
    if found:
        places = ", ".join(f"{c.__name__} ({place_of_class(c)})" for c in found)
        example = f"{file}:{found[-1].__name__}"
        return f"{file} has {places}. Keep one of them, or name it: handler: {example}"
    functions = [name for name in names_in(module) if code_of(getattr(module, name)) is not None]
    remedy = "Define one class with initialize(context) and handle(data, context), or a function handle(data, context)"
    if functions:
        remedy += f"; or name a function of these arguments: handler: {file}:{functions[-1]}"
    return f"{file} has no class and no function `handle`; it defines {shown(names_in(module))}. {remedy}"


def place_of_class(handler: type[Any]) -> str:
    try:
        return f"line {inspect.getsourcelines(handler)[1]}"
    except (OSError, TypeError):
        return "line unknown"
