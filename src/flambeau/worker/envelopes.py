"""The envelope a model or the server names → around the handler's entry point."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flambeau.errors import HandlerError
from flambeau.importing import import_file
from flambeau.worker.context import Context

Handle = Callable[[Any, Context], Any]

ENVELOPES = {
    "body": "flambeau.handlers.envelopes.base:BodyEnvelope",
    "json": "flambeau.handlers.envelopes.base:JSONEnvelope",
    "kserve": "flambeau.handlers.envelopes.kserve:KServeEnvelope",
    "kservev2": "flambeau.handlers.envelopes.kserve:KServev2Envelope",
    "instances": "flambeau.handlers.envelopes.kserve:InstancesEnvelope",
    "open_inference": "flambeau.handlers.envelopes.open_inference:OpenInferenceEnvelope",
}
TORCHSERVE = "ts.torch_handler.request_envelope"


def put_in_envelope(handle: Handle, envelope: type[Any], *, is_concurrent: bool) -> Handle:
    """An entry point whose input and output go through an envelope."""
    if not is_concurrent:
        wrapped: Handle = envelope(handle).handle
        return wrapped

    async def handle_concurrently(data: Any, context: Context) -> Any:
        result = envelope(handle).handle(data, context)  # one each: calls overlap, and an envelope remembers its batch
        return await result if inspect.isawaitable(result) else result

    return handle_concurrently


def find_envelope(name: str, folder: Path) -> type[Any]:
    """The class of an envelope: a built-in one, the model's own file, or an installed module's first class."""
    if name in ENVELOPES:
        module_name, _, class_name = ENVELOPES[name].partition(":")
        found: type[Any] = getattr(importlib.import_module(module_name), class_name)
        return found
    return first_class(find_module(name, folder))


def find_module(name: str, folder: Path) -> ModuleType:
    """The module that an envelope's name means."""
    file = folder / f"{name}.py"
    if file.is_file():
        return import_file(file)
    for candidate in (f"{TORCHSERVE}.{name}", name):
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name not in (name, candidate, *parents_of(candidate)):  # found, but what it imports is not
                raise
    raise HandlerError(
        f"no envelope {name!r}: there is no {name}.py in the archive and no installed module of that name. "
        f"Built in: {', '.join(ENVELOPES)}"
    )


def parents_of(name: str) -> list[str]:
    """The packages that a dotted name goes through."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def first_class(module: ModuleType) -> type[Any]:
    """The first class of a module that can be an envelope."""
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "handle"):
            return value
    raise HandlerError(f"{module.__name__} has no class with a method handle(data, context), so it is no envelope")
