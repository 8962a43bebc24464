"""The loader: the handler and the envelope that a model names → an object ready to use."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from flambeau.archive.manifest import BUILT_IN, UNSUPPORTED
from flambeau.errors import HandlerError, suggest
from flambeau.file_import import import_file
from flambeau.wire.example_requests import to_text
from flambeau.wire.messages import TensorSpec
from flambeau.worker.context import Context
from flambeau.worker.load_mistakes import (
    explain_classes,
    explain_hooks,
    explain_missing_method,
    explain_shadowing,
    names_in,
    shown,
)

logger = logging.getLogger(__name__)

Handle = Callable[[Any, Context], Any]
MAX_SHOWN = 8  # files in an error message
ONE_CLASS = "Expected only one class in custom service code or a function entry point"

ENVELOPES = {
    "body": "flambeau.handlers.envelopes.base:BodyEnvelope",
    "json": "flambeau.handlers.envelopes.base:JSONEnvelope",
    "kserve": "flambeau.handlers.envelopes.kserve:KServeEnvelope",
    "kservev2": "flambeau.handlers.envelopes.kserve:KServev2Envelope",
    "instances": "flambeau.handlers.envelopes.kserve:InstancesEnvelope",
    "open_inference": "flambeau.handlers.envelopes.open_inference:OpenInferenceEnvelope",
}
ENVELOPE_PACKAGE = "ts.torch_handler.request_envelope"


@dataclass(frozen=True, slots=True)
class LoadedHandler:
    """What the worker calls for each batch, and the object behind it."""

    handle: Handle
    is_concurrent: bool  # an `async def`: many calls may run at a time
    handler: Any = None  # None: a plain function
    initialize_s: float = 0.0  # how long its creation and `initialize` took
    envelope: str = ""  # what `handle` is wrapped in
    abilities: tuple[str, ...] = ()  # what front ends may ask for besides predictions
    example: str = ""  # a request body that it accepts


def load_handler(value: str, folder: Path, context: Context, loop: asyncio.AbstractEventLoop) -> LoadedHandler:
    """Find, create and initialize the handler; an `async def initialize` runs on `loop`."""
    put_on_path(folder)
    for sentence in explain_shadowing(folder):
        logger.warning("%s", sentence)
    found = find_handler(value, folder)
    end_imports()
    return initialize(found, context, loop)


def end_imports() -> None:
    """Start the collector of a worker process, which begins without; it leaves the modules out, also at exit."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def find_handler(value: str, folder: Path) -> Callable[..., Any]:
    """The class or function that a handler value names: `file`, `file.py:function` or a built-in name."""
    if not value:
        raise HandlerError(
            "this model names no handler: set model.handler in its manifest, give `handler` when you register it, "
            "or set default_service_handler"
        )
    module_name, _, wanted = value.partition(":")
    path = Path(module_name.removesuffix(".py"))
    name = path.name
    is_inside = not path.is_absolute() and ".." not in path.parts  # of other paths only the name counts
    if is_inside and (folder / path.parent / f"{name}.py").is_file():
        folder = folder / path.parent  # `dir/foo.py:entry` in a register call
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    if name in BUILT_IN and not (folder / f"{name}.py").is_file():
        return built_in(name)
    module = import_handler(name, folder)
    function: Callable[..., Any] | None = getattr(module, wanted or "handle", None)
    if function is None and not wanted and not handler_classes(module):
        function = only_function(module)
    if callable(function) and not inspect.isclass(function):
        return per_request(function) if takes_one(function) else function
    if inspect.isclass(function):  # `file.py:Class` chooses one of several
        return complete(function)
    if wanted and not handler_classes(module):
        near = suggest(wanted, names_in(module))
        raise HandlerError(
            f"{ONE_CLASS}: {name}.py has no function {wanted!r}; it defines {shown(names_in(module))}. "
            + (f"Did you mean {name}.py:{near}?" if near else "Correct the name after the colon")
        )
    return the_class(module)


def initialize(found: Callable[..., Any], context: Context, loop: asyncio.AbstractEventLoop) -> LoadedHandler:
    began = time.perf_counter()
    loaded, pending = begin_initialize(found, context)
    finish(pending, loop)
    return replace(loaded, initialize_s=time.perf_counter() - began, example=example_of(found, loaded.handler))


def example_of(found: Callable[..., Any], handler: Any) -> str:
    """The request body in `example` of the handler, or of the module it is in; empty if there is none."""
    for holder in (handler, sys.modules.get(found.__module__)):
        if (example := getattr(holder, "example", None)) is not None:
            return to_text(example)
    return ""


def begin_initialize(found: Callable[..., Any], context: Context) -> tuple[LoadedHandler, Any]:
    """The handler, and the return value of its initialization, which may have to be awaited."""
    if not inspect.isclass(found):  # a function initializes itself when it is called without data
        return LoadedHandler(found, is_async(found)), found(None, context)
    hints = [*explain_hooks(found)]
    for sentence in hints:
        logger.warning("%s", sentence)
    try:
        return create(found, context)
    except Exception as error:
        for sentence in hints:  # the likely reason
            error.add_note(sentence)
        raise


def create(found: type[Any], context: Context) -> tuple[LoadedHandler, Any]:
    handler: Any = found()
    abilities = tuple(getattr(handler, "abilities", ()))
    loaded = LoadedHandler(handler.handle, is_async(handler.handle), handler, abilities=abilities)
    return loaded, handler.initialize(context)


def built_in(name: str) -> type[Any]:
    module, _, class_name = BUILT_IN[name].partition(":")
    handler_class: type[Any] = getattr(importlib.import_module(module), class_name)
    return handler_class


def finish(result: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Run a coroutine or generator to its end; any other result is complete."""
    if inspect.isasyncgen(result):
        loop.run_until_complete(exhaust(result))
    elif inspect.isawaitable(result):
        loop.run_until_complete(result)
    elif inspect.isgenerator(result):
        for _ in result:
            pass


async def exhaust(items: AsyncIterator[Any]) -> None:
    async for _ in items:
        pass


def put_on_path(folder: Path) -> None:
    """Let the handler import the files beside it, in this process and in those it starts."""
    sys.path.insert(0, str(folder))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{others}{os.pathsep}{folder}" if others else str(folder)


def import_handler(name: str, folder: Path) -> ModuleType:
    """The module of that name: the model's own file first, then an installed one."""
    file = folder / f"{name}.py"
    if file.is_file():
        return import_file(file)
    if name in UNSUPPORTED:
        raise HandlerError(f"{name} is not a handler of this server: {UNSUPPORTED[name]}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the module was found, but one of its imports was not
            raise
        head, _, inner = name.partition(".")
        near = f"Did you mean {head}.py:{inner}? " if inner and (folder / f"{head}.py").is_file() else ""
        raise HandlerError(
            f"no handler {name!r}: there is no {name}.py in the archive, no built-in handler and no installed module "
            f"of that name. {near}{files_in(folder)}Built in: {', '.join(sorted(BUILT_IN))}"
        ) from None


def files_in(folder: Path) -> str:
    """The Python files of a model, for error messages."""
    names = sorted(path.name for path in folder.glob("*.py"))[:MAX_SHOWN]
    return f"The model has {', '.join(names)}. " if names else ""


def handler_classes(module: ModuleType) -> list[type[Any]]:
    """The classes of a module that have `handle` and `initialize`; without such, all classes it defines.

    A module without classes of its own may re-export a handler class; BaseHandler itself does not count.
    """
    known = [v for v in vars(module).values() if inspect.isclass(v)]
    able = [c for c in known if hasattr(c, "handle") and hasattr(c, "initialize")]
    own = [c for c in known if c.__module__ == module.__name__]
    imported = [c for c in able if c.__name__ != "BaseHandler"]
    return [c for c in own if c in able] or own or imported


def the_class(module: ModuleType) -> type[Any]:
    """The only handler class of a module; raises HandlerError if there is none, or more than one."""
    classes = handler_classes(module)
    if len(classes) > 1:  # of a base class and its subclass, the subclass
        leaves = [c for c in classes if not any(c in other.__mro__[1:] for other in classes)]
        classes = leaves if len(leaves) == 1 else classes
    if len(classes) != 1:
        raise HandlerError(f"{ONE_CLASS}: {explain_classes(module, classes)}")
    return complete(classes[0])


def complete(handler: type[Any]) -> type[Any]:
    """A class with the two methods that the worker calls; raises HandlerError if one is missing."""
    for method in ("handle", "initialize"):
        if not callable(getattr(handler, method, None)):
            hint = explain_missing_method(handler, method)
            raise HandlerError(f"Expect {method} method in class {handler.__name__}: {hint}")
    return handler


def is_async(function: Handle) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


# ---- functions of one argument ----


def only_function(module: ModuleType) -> Callable[..., Any] | None:
    """The only public function that a module defines, if it takes one argument."""
    known = [v for k, v in vars(module).items() if inspect.isfunction(v) and not k.startswith("_")]
    own = [function for function in known if function.__module__ == module.__name__]
    return own[0] if len(own) == 1 and takes_one(own[0]) else None


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function takes the body of a request, and not (data, context)."""
    try:
        outer, inner = (inspect.signature(function, follow_wrapped=follows) for follows in (False, True))
    except (TypeError, ValueError):  # written in C
        return False
    # A decorator often takes any arguments; what it wraps then decides.
    return fits(outer, 1) and fits(inner, 1) and not fits(inner, 2)


def fits(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return False
    return True


def per_request(function: Callable[..., Any]) -> Handle:
    """A handler that calls a function with the body of each request; a generator streams to one request."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def handle(data: Any, context: Context) -> Any:
            if data is not None:
                async for part in function(only_body(data)):
                    yield [part]

    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def handle(data: Any, context: Context) -> Any:
            rows = enumerate(data or ())
            return None if data is None else [answer(context, i, await function(body_of(row))) for i, row in rows]

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def handle(data: Any, context: Context) -> Any:
            if data is not None:
                for part in function(only_body(data)):
                    yield [part]

    else:

        @functools.wraps(function)
        def handle(data: Any, context: Context) -> Any:
            rows = enumerate(data or ())
            return None if data is None else [answer(context, i, function(body_of(row))) for i, row in rows]

    return handle


def body_of(row: Mapping[str, Any]) -> Any:
    """The body of a request; of a form, its fields."""
    return next((row[name] for name in ("body", "data") if name in row), row)


def only_body(data: Sequence[Mapping[str, Any]]) -> Any:
    if len(data) != 1:
        raise HandlerError(f"a generator of one argument streams to one request, not to {len(data)}; set batchSize: 1")
    return body_of(data[0])


def answer(context: Context, i: int, value: Any) -> Any:
    """Name the content type of values that are sent as JSON."""
    if not isinstance(value, str | bytes | bytearray):
        context.set_response_content_type(i, "application/json")
    return value


# ---- envelopes ----


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors that a handler's `tensor_metadata` declares."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


def declared_tensors(handler: Any) -> ModelTensors:
    """What a handler declares with `tensor_metadata()`; nothing if it has no such method, or it returns None."""
    declare = getattr(handler, "tensor_metadata", None)
    document = declare() if callable(declare) else None
    if document is None:
        return ModelTensors()
    try:
        inputs, outputs = (tuple(to_spec(**entry) for entry in document[side]) for side in ("inputs", "outputs"))
    except (TypeError, KeyError, ValueError) as error:
        raise HandlerError(
            'tensor_metadata() must return {"inputs": […], "outputs": […]}, each with name, datatype and shape: '
            f"{type(error).__name__}: {error}"
        ) from None
    return ModelTensors(inputs, outputs)


def to_spec(name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(str(name), str(datatype), [int(size) for size in shape])


def in_envelope(loaded: LoadedHandler, name: str, folder: Path) -> LoadedHandler:
    """The handler in the envelope of that name; without a name, the handler itself."""
    if not name:
        return loaded
    envelope: Callable[..., Any] = find_envelope(name, folder)
    if name == "open_inference" and (declared := declared_tensors(loaded.handler).outputs):
        envelope = functools.partial(envelope, declared={spec.name: spec.datatype for spec in declared})
    wrapped = put_in_envelope(loaded.handle, envelope, is_concurrent=loaded.is_concurrent)
    return replace(loaded, handle=wrapped, envelope=name)


def put_in_envelope(handle: Handle, envelope: Callable[..., Any], *, is_concurrent: bool) -> Handle:
    if not is_concurrent:
        wrapped: Handle = envelope(handle).handle
        return wrapped

    @functools.wraps(handle)
    async def handle_concurrently(data: Any, context: Context) -> Any:
        # A new envelope for each call: calls overlap, and an envelope keeps its batch.
        result = envelope(handle).handle(data, context)
        return await result if inspect.isawaitable(result) else result

    return handle_concurrently


def find_envelope(name: str, folder: Path) -> type[Any]:
    """The class of an envelope: built in, or the first class of the model's own file or of an installed module."""
    if name in ENVELOPES:
        module_name, _, class_name = ENVELOPES[name].partition(":")
        found: type[Any] = getattr(importlib.import_module(module_name), class_name)
        return found
    return first_class(find_module(name, folder))


def find_module(name: str, folder: Path) -> ModuleType:
    file = folder / f"{name}.py"
    if file.is_file():
        return import_file(file)
    for candidate in (f"{ENVELOPE_PACKAGE}.{name}", name):
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name not in (name, candidate, *parents_of(candidate)):  # found, but one of its imports is not
                raise
    raise HandlerError(
        f"no envelope {name!r}: there is no {name}.py in the archive and no installed module of that name. "
        f"Built in: {', '.join(ENVELOPES)}"
    )


def parents_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def first_class(module: ModuleType) -> type[Any]:
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "handle"):
            return value
    raise HandlerError(f"{module.__name__} has no class with a method handle(data, context), which an envelope needs")
