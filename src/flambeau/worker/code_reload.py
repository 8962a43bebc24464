"""Code reload: changed code is loaded before the next batch; weights are kept where that is safe."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from flambeau.archive.manifest import manifest_of
from flambeau.config.model import read_options
from flambeau.errors import HandlerError
from flambeau.worker.code_changes import (
    MAX_FILES,
    Code,
    dependents,
    differing,
    first_change,
    forget,
    inherited_names,
    modules_from,
    read_sources,
    setup_code,
    stamps,
)
from flambeau.worker.context import Context
from flambeau.worker.generation import has_generation
from flambeau.worker.loader import (
    LoadedHandler,
    begin_initialize,
    exhaust,
    find_handler,
    finish,
    is_async,
    load_handler,
)

logger = logging.getLogger(__name__)


def load_watched(value: str, folder: Path, context: Context, loop: asyncio.AbstractEventLoop) -> LoadedHandler:
    """As `load_handler`, but each call of the handler first checks its code for changes."""
    reloader = HandlerReloader(value, folder, context, loop)
    if has_generation(reloader.loaded.handler):
        logger.info("%s generates step by step: its code is not reloaded", value)
        return reloader.loaded
    is_concurrent = reloader.loaded.is_concurrent
    # Only the reloader holds the instance: when it is replaced, its weights must be freed.
    handle = reloader.handle_async if is_concurrent else reloader.handle
    return LoadedHandler(handle, is_concurrent, abilities=reloader.loaded.abilities, example=reloader.loaded.example)


class HandlerReloader:
    """Holds a handler and replaces it, or its class only, when its files change."""

    def __init__(self, value: str, folder: Path, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._value = value
        self._folder = folder
        self._context = context
        self._loop = loop
        manifest = manifest_of(folder)
        self._config = folder / manifest.config_file if manifest and manifest.config_file else None
        self._model_file = folder / manifest.model_file if manifest and manifest.model_file else None
        self._stamps = self._read_stamps()  # before loading, so that no change is missed
        self._sources = read_sources(self._stamps)
        self.loaded = load_handler(value, folder, context, loop)
        self._setup = self._setup_of(type(self.loaded.handler))
        self._reason: str | None = None  # why the handler was created again at the last reload, if it was
        self._error: BaseException | None = None
        self._gate = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        logger.info("watching %s: its code is reloaded when it changes", folder)
        if len(self._stamps) >= MAX_FILES:
            logger.warning("only %d Python files below %s are watched", MAX_FILES, folder)

    # ---- calls ----

    def handle(self, rows: Any, context: Context) -> Any:
        """Run a batch with the current code."""
        if changed := self._changes():
            with self._reloading(changed):
                loaded, pending = self._load(changed)
                finish(pending, self._loop)
                self._accept(loaded)
        self._check()
        return self.loaded.handle(rows, context)

    async def handle_async(self, rows: Any, context: Context) -> Any:
        """The same where calls overlap: new code is loaded when the calls of the old code have ended."""
        async with self._gate:
            if changed := self._changes():
                await self._idle.wait()
                with self._reloading(changed):
                    loaded, pending = self._load(changed)
                    if inspect.isasyncgen(pending):
                        await exhaust(pending)
                    elif inspect.isawaitable(pending):
                        await pending
                    self._accept(loaded)
            self._check()
            self._in_flight += 1
            self._idle.clear()
        result = None
        try:
            result = self.loaded.handle(rows, context)
            if inspect.isawaitable(result):
                result = await result
            return self._stream(result) if inspect.isasyncgen(result) else result
        finally:
            if not inspect.isasyncgen(result):
                self._end_call()

    async def _stream(self, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()  # type: ignore[attr-defined]
            self._end_call()

    def _end_call(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    def _check(self) -> None:
        if self._error is not None:  # the old code must not answer in place of the new
            raise_load_error(self._error)

    # ---- changes ----

    def _read_stamps(self) -> dict[Path, tuple[int, int]]:
        return stamps(self._folder, [self._config] if self._config else [])

    def _changes(self) -> set[Path]:
        """The files of the handler that have changed since the last call."""
        now = self._read_stamps()
        if now == self._stamps:
            return set()
        changed = differing(self._stamps, now)
        self._stamps = now
        self._sources = {**{file: text for file, text in self._sources.items() if file in now}, **read_sources(changed)}
        if self._error is not None:  # any file may fix it
            return changed
        return changed & {*modules_from(self._folder).values(), self._config, self._model_file}

    @contextmanager
    def _reloading(self, changed: set[Path]) -> Iterator[None]:
        names = ", ".join(sorted(file.name for file in changed))
        try:
            yield
        except (Exception, SystemExit) as error:
            self._error = error
            logger.error("%s changed and cannot be loaded: %s: %s", names, type(error).__name__, error)
            return
        self._error = None
        if self.loaded.handler is None:
            logger.info("reloaded %s", names)
        elif self._reason is None:
            logger.info("reloaded %s, weights kept", names)
        else:
            logger.info("reloaded %s, with its weights, because %s", names, self._reason)

    def _load(self, changed: set[Path]) -> tuple[LoadedHandler, Any]:
        """Import the new code; the handler, and the return value of its initialization."""
        old_options = self._context.model_yaml_config
        if self._config is not None:
            self._context.model_yaml_config = read_options(self._config)
        stale = dependents(modules_from(self._folder), self._sources, changed)
        forget(stale, changed)
        found = find_handler(self._value, self._folder)
        self._reason = self._reason_to_recreate(found, stale, old_options)
        if self._reason is None:
            handler = self.loaded.handler
            handler.__class__ = found
            return LoadedHandler(handler.handle, is_async(handler.handle), handler), None
        # The old weights are freed first: the device may not hold two sets.
        self.loaded, self._setup = LoadedHandler(raise_no_handler, self.loaded.is_concurrent), {}
        return begin_initialize(found, self._context)

    def _accept(self, loaded: LoadedHandler) -> None:
        if loaded.is_concurrent != self.loaded.is_concurrent:
            raise HandlerError("handle was changed between def and async def: restart the server to load it")
        self.loaded = loaded
        self._setup = self._setup_of(type(loaded.handler))

    def _reason_to_recreate(self, found: Any, stale: set[str], old_options: Mapping[str, Any]) -> str | None:
        """Why the handler must be created again; None if it only needs its new class."""
        handler = self.loaded.handler
        if handler is None or not inspect.isclass(found):
            return "it was not loaded before" if inspect.isclass(found) else "it is a function"
        if self._config is not None and old_options != self._context.model_yaml_config:
            return f"{self._config.name} changed"
        own = {*stale, type(handler).__module__}
        for name, value in getattr(handler, "__dict__", {}).items():
            if inspect.isroutine(value) and getattr(value, "__module__", None) in own:
                return f"self.{name} is a function of the old code"
        if change := first_change(self._setup, self._setup_of(found)):
            return f"{change.rpartition(': ')[2]} changed"
        return None if can_become(handler, found) else "the layout of its class changed"

    def _setup_of(self, handler_class: type[Any]) -> Code:
        files = {*modules_from(self._folder).values(), self._model_file}
        sources = {str(file): text for file, text in self._sources.items() if file in files and file.suffix == ".py"}
        kin = [base.__name__ for base in handler_class.__mro__]
        return setup_code(sources, kin, inherited_names(handler_class), [str(self._model_file)])


def can_become(handler: Any, new_class: type[Any]) -> bool:
    """Whether an instance can take another class; it cannot if slots or bases change its layout."""
    old_class = type(handler)
    try:
        handler.__class__ = new_class
    except TypeError:
        return False
    handler.__class__ = old_class
    return True


def raise_no_handler(rows: Any, context: Context) -> NoReturn:
    raise HandlerError("there is no handler")


def raise_load_error(error: BaseException) -> NoReturn:
    raise HandlerError(f"the changed code cannot be loaded: {type(error).__name__}: {error}") from error
