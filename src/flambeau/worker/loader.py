"""The handler a manifest names → an object ready to use."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from flambeau.archive.builtin_handlers import BUILT_IN, UNSUPPORTED
from flambeau.errors import HandlerError
from flambeau.importing import import_file
from flambeau.worker.context import Context
from flambeau.worker.envelopes import Handle, find_envelope, put_in_envelope


@dataclass(frozen=True, slots=True)
class Entry:
    """What the worker calls for each batch, whether many calls may run at a time, and the object behind it."""

    handle: Handle
    is_concurrent: bool
    handler: Any = None  # None: a plain function
    initialize_s: float = 0.0  # how long it took to make and initialize it
    envelope: str = ""  # what `handle` is wrapped in
    abilities: tuple[str, ...] = ()  # what its class says that front ends may ask for beside predictions


def load_handler(value: str, folder: Path, context: Context, loop: asyncio.AbstractEventLoop) -> Entry:
    """Find the handler, instantiate and initialize it; what is `async` about that runs on `loop`."""
    put_on_path(folder)
    return initialize(find_handler(value, folder), context, loop)


def in_envelope(entry: Entry, name: str, folder: Path) -> Entry:
    """The same entry, with its input and output in the envelope of that name; without a name, as it is."""
    if not name:
        return entry
    wrapped = put_in_envelope(entry.handle, find_envelope(name, folder), is_concurrent=entry.is_concurrent)
    return replace(entry, handle=wrapped, envelope=name)


def find_handler(value: str, folder: Path) -> Callable[..., Any]:
    """The class or function that a handler value names."""
    if not value:
        raise HandlerError(
            "this model names no handler: set model.handler in its manifest, give `handler` when you register it, "
            "or set default_service_handler"
        )
    module_name, _, wanted = value.partition(":")
    path = Path(module_name.removesuffix(".py"))
    name = path.name
    is_inside = not path.is_absolute() and ".." not in path.parts  # of any other path the name counts, as in TorchServe
    if is_inside and (folder / path.parent / f"{name}.py").is_file():
        folder = folder / path.parent  # `dir/foo.py:entry`, as a register call may say
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    if name in BUILT_IN and not (folder / f"{name}.py").is_file():
        return built_in(name)
    module = import_handler(name, folder)
    function: Callable[..., Any] | None = getattr(module, wanted or "handle", None)
    if callable(function) and not inspect.isclass(function):
        return function
    if wanted and not handler_classes(module):
        raise HandlerError(
            "Expected only one class in custom service code or a function entry point: "
            f"{name}.py has no function {wanted!r}; it defines {', '.join(names_in(module)) or 'nothing'}"
        )
    return the_class(module)


def initialize(found: Callable[..., Any], context: Context, loop: asyncio.AbstractEventLoop) -> Entry:
    """A function, or an instance of a handler class, ready for its first batch."""
    began = time.perf_counter()
    entry, pending = begin_initialize(found, context)
    finish(pending, loop)
    return replace(entry, initialize_s=time.perf_counter() - began)


def begin_initialize(found: Callable[..., Any], context: Context) -> tuple[Entry, Any]:
    """The entry, and what its initialization returned: maybe something still to be awaited."""
    if not inspect.isclass(found):  # the convention for functions: no data means initialize
        return Entry(found, is_async(found)), found(None, context)
    handler: Any = found()
    abilities = tuple(getattr(handler, "abilities", ()))
    return Entry(handler.handle, is_async(handler.handle), handler, abilities=abilities), handler.initialize(context)


def built_in(name: str) -> type[Any]:
    """The class of a built-in handler."""
    module, _, class_name = BUILT_IN[name].partition(":")
    handler_class: type[Any] = getattr(importlib.import_module(module), class_name)
    return handler_class


def finish(result: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Let an initialization run to its end, if calling it was only the beginning."""
    if inspect.isasyncgen(result):
        loop.run_until_complete(exhaust(result))
    elif inspect.isawaitable(result):
        loop.run_until_complete(result)
    elif inspect.isgenerator(result):
        for _ in result:
            pass


async def exhaust(items: AsyncIterator[Any]) -> None:
    """Run an async generator to its end."""
    async for _ in items:
        pass


def put_on_path(folder: Path) -> None:
    """Let the handler import its neighbors, in this process and in those it starts."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{others}{os.pathsep}{folder}" if others else str(folder)


def import_handler(name: str, folder: Path) -> ModuleType:
    """The module of that name: the model's own file first, then any other."""
    file = folder / f"{name}.py"
    if file.is_file():
        return import_file(file)
    if name in UNSUPPORTED:
        raise HandlerError(f"{name} is not a handler of this server: {UNSUPPORTED[name]}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the module was found; something that it imports was not
            raise
        raise HandlerError(
            f"no handler {name!r}: there is no {name}.py in the archive, no built-in handler and no installed module "
            f"of that name. Built in: {', '.join(sorted(BUILT_IN))}"
        ) from None


def names_in(module: ModuleType) -> list[str]:
    """What a module defines itself, for error messages."""
    return [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]


def handler_classes(module: ModuleType) -> list[type[Any]]:
    """The classes a module defines that can be handlers; all its classes if none has both methods.

    A module without a class of its own may hand on one that it has imported; BaseHandler alone is none.
    """
    known = [v for v in vars(module).values() if inspect.isclass(v)]
    able = [c for c in known if hasattr(c, "handle") and hasattr(c, "initialize")]
    own = [c for c in known if c.__module__ == module.__name__]
    handed_on = [c for c in able if c.__name__ != "BaseHandler"]
    return [c for c in own if c in able] or own or handed_on


def the_class(module: ModuleType) -> type[Any]:
    """The one handler class of a module."""
    classes = handler_classes(module)
    if len(classes) > 1:  # a base class and its specialization: the specialization is meant
        leaves = [c for c in classes if not any(c in other.__mro__[1:] for other in classes)]
        classes = leaves if len(leaves) == 1 else classes
    if len(classes) != 1:
        found = ", ".join(c.__name__ for c in classes) or "none"
        raise HandlerError(
            "Expected only one class in custom service code or a function entry point: "
            f"{module.__name__} has {found}. Define one class with initialize(context) and handle(data, context), "
            "or a function handle(data, context)"
        )
    handler = classes[0]
    for method in ("handle", "initialize"):
        if not hasattr(handler, method):
            raise HandlerError(f"Expect {method} method in class {handler.__name__}")
    return handler


def is_async(function: Handle) -> bool:
    """Whether a handler gives its thread back while it waits."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
