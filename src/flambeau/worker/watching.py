"""Watched handlers: code that changes is loaded before the next batch, and weights are kept where that is safe."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from flambeau.archive.model_folder import manifest_of
from flambeau.config.model import read_options
from flambeau.errors import HandlerError
from flambeau.worker.changes import MAX_FILES, dependents, differing, forget, modules_from, read_sources, stamps
from flambeau.worker.context import Context
from flambeau.worker.loader import Entry, begin_initialize, exhaust, find_handler, finish, is_async, load_handler
from flambeau.worker.setup_code import Code, first_change, inherited_names, setup_code

logger = logging.getLogger(__name__)


def load_watched(value: str, folder: Path, context: Context, loop: asyncio.AbstractEventLoop) -> Entry:
    """As `load_handler`, but before each batch the entry looks for changes of the code."""
    watcher = Watcher(value, folder, context, loop)
    if callable(getattr(watcher.entry.handler, "generation", None)):
        logger.info("%s generates step by step: its code is not reloaded while it does", value)
        return watcher.entry
    is_concurrent = watcher.entry.is_concurrent
    # The instance stays the watcher's alone: when it must go, its weights must go with it.
    handle = watcher.handle_async if is_concurrent else watcher.handle
    return Entry(handle, is_concurrent, abilities=watcher.entry.abilities)


class Watcher:
    """Holds a handler and replaces it, or only its class, when its files change."""

    def __init__(self, value: str, folder: Path, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._value = value
        self._folder = folder
        self._context = context
        self._loop = loop
        manifest = manifest_of(folder)
        self._config = folder / manifest.config_file if manifest and manifest.config_file else None
        self._model_file = folder / manifest.model_file if manifest and manifest.model_file else None
        self._stamps = self._look()  # before loading, so that no change is missed
        self._sources = read_sources(self._stamps)
        self.entry = load_handler(value, folder, context, loop)
        self._setup = self._setup_of(type(self.entry.handler))
        self._why: str | None = None  # the handler was made anew, if it was
        self._error: BaseException | None = None
        self._gate = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        logger.info("watching %s: its code is reloaded when it changes", folder)
        if len(self._stamps) >= MAX_FILES:
            logger.warning("only %d Python files below %s are watched", MAX_FILES, folder)

    # ---- what the worker calls ----

    def handle(self, rows: Any, context: Context) -> Any:
        """Run a batch with the code as it is now."""
        if changed := self._changes():
            with self._reloading(changed):
                entry, pending = self._load(changed)
                finish(pending, self._loop)
                self._accept(entry)
        self._check()
        return self.entry.handle(rows, context)

    async def handle_async(self, rows: Any, context: Context) -> Any:
        """The same where many calls run at a time: new code waits until those of the old have ended."""
        async with self._gate:
            if changed := self._changes():
                await self._idle.wait()
                with self._reloading(changed):
                    entry, pending = self._load(changed)
                    if inspect.isasyncgen(pending):
                        await exhaust(pending)
                    elif inspect.isawaitable(pending):
                        await pending
                    self._accept(entry)
            self._check()
            self._in_flight += 1
            self._idle.clear()
        result = None
        try:
            result = self.entry.handle(rows, context)
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
        """Old code is not used for new: what is wrong with the new code is the answer."""
        if self._error is not None:
            refuse(self._error)

    # ---- changes ----

    def _look(self) -> dict[Path, tuple[int, int]]:
        return stamps(self._folder, [self._config] if self._config else [])

    def _changes(self) -> set[Path]:
        """The files that matter here and have changed since the last look."""
        now = self._look()
        if now == self._stamps:
            return set()
        changed = differing(self._stamps, now)
        self._stamps = now
        self._sources = {**{file: text for file, text in self._sources.items() if file in now}, **read_sources(changed)}
        if self._error is not None:  # it may be any file that was missing or wrong
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
        if self.entry.handler is None:
            logger.info("reloaded %s", names)
        elif self._why is None:
            logger.info("reloaded %s, weights kept", names)
        else:
            logger.info("reloaded %s, with its weights, because %s", names, self._why)

    def _load(self, changed: set[Path]) -> tuple[Entry, Any]:
        """Import the new code and make an entry of it; with what is still to be awaited."""
        old_options = self._context.model_yaml_config
        if self._config is not None:
            self._context.model_yaml_config = read_options(self._config)
        stale = dependents(modules_from(self._folder), self._sources, changed)
        forget(stale, changed)
        found = find_handler(self._value, self._folder)
        self._why = self._why_anew(found, stale, old_options)
        if self._why is None:
            handler = self.entry.handler
            handler.__class__ = found
            return Entry(handler.handle, is_async(handler.handle), handler), None
        # Two sets of weights may be more than the device can hold.
        self.entry, self._setup = Entry(refuse_all, self.entry.is_concurrent), {}
        return begin_initialize(found, self._context)

    def _accept(self, entry: Entry) -> None:
        if entry.is_concurrent != self.entry.is_concurrent:
            raise HandlerError("handle was changed from def to async def, or back: that needs a restart of the server")
        self.entry = entry
        self._setup = self._setup_of(type(entry.handler))

    def _why_anew(self, found: Any, stale: set[str], old_options: Mapping[str, Any]) -> str | None:
        """Why a handler must be made anew; None when it only needs its new class."""
        handler = self.entry.handler
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
        """The code that takes part in making and initializing a handler of that class."""
        files = {*modules_from(self._folder).values(), self._model_file}
        sources = {str(file): text for file, text in self._sources.items() if file in files and file.suffix == ".py"}
        kin = [base.__name__ for base in handler_class.__mro__]
        return setup_code(sources, kin, inherited_names(handler_class), [str(self._model_file)])


def can_become(handler: Any, new_class: type[Any]) -> bool:
    """Whether an instance can take another class: not when slots or bases give it another layout."""
    old_class = type(handler)
    try:
        handler.__class__ = new_class
    except TypeError:
        return False
    handler.__class__ = old_class
    return True


def refuse_all(rows: Any, context: Context) -> NoReturn:
    """In the place of a handler that is gone."""
    raise HandlerError("there is no handler")


def refuse(error: BaseException) -> NoReturn:
    """Answer with what is wrong with the new code."""
    raise HandlerError(f"the changed code cannot be loaded: {type(error).__name__}: {error}") from error
