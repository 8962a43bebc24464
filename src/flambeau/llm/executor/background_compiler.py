"""BackgroundCompiler: compiles faster decode paths in a background thread while steps go on."""

from __future__ import annotations

import atexit
import ctypes
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from torch import Tensor

from flambeau.llm.executor.inputs import StepInputs

log = logging.getLogger(__name__)

Decode = Callable[[StepInputs], Tensor]  # → the logits [T, V] of every token
Compiled = TypeVar("Compiled")

CLOSE_TIMEOUT_S = 1.0
EXIT_TIMEOUT_S = 30.0  # for the call into PyTorch or a compiler that a thread is in when the process exits


class Abandoned(BaseException):
    """Ends a compilation whose result nobody needs; no handler of errors catches it."""


class BackgroundCompiler(Generic[Compiled]):
    """One thread that compiles, for example decode functions, in the order in which they are first requested."""

    def __init__(self) -> None:
        self._requested: set[Hashable] = set()
        self._compiled: dict[Hashable, Compiled] = {}
        self._jobs: queue.SimpleQueue[tuple[Hashable, Callable[[], Compiled]] | None] = queue.SimpleQueue()
        self._is_idle = threading.Condition()
        self._num_open = 0
        self._has_failed = False
        self._thread: threading.Thread | None = None
        opened.add(self)

    def find(self, key: Hashable, compile_: Callable[[], Compiled]) -> Compiled | None:
        """Return what was compiled under this key; the first call starts it, and None means not ready."""
        compiled = self._compiled.get(key)
        if compiled is None and key not in self._requested and not self._has_failed:
            self._requested.add(key)
            with self._is_idle:
                self._num_open += 1
            self._jobs.put((key, compile_))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="compiling", daemon=True)
                self._thread.start()
        return compiled

    def _work(self) -> None:
        with suppress(Abandoned):
            self._compile_all()
        with self._is_idle:
            self._num_open = 0
            self._is_idle.notify_all()

    def _compile_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, compile_ = job
            try:
                if not self._has_failed:
                    self._compiled[key] = compile_()
            except Exception as error:
                # Steps go on without it. If nothing was ever compiled, the next attempt would fail too.
                self._has_failed = self._has_failed or not self._compiled
                log.warning("decoding is not compiled and stays slower: %s", summary(error))
                log.debug("compilation failed", exc_info=True)
            del job, compile_  # else this thread would free the model, perhaps while the process exits
            with self._is_idle:
                self._num_open -= 1
                self._is_idle.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything requested is compiled or has failed; False after the timeout."""
        with self._is_idle:
            return self._is_idle.wait_for(lambda: self._num_open == 0, timeout_s)

    def close(self) -> None:
        """Compile nothing more; a long compilation is abandoned, and may end later."""
        self._end(CLOSE_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        self._has_failed = True
        self._jobs.put(None)
        thread = self._thread
        if thread is None or not thread.is_alive() or thread.ident is None:
            return
        if self._num_open:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
        thread.join(timeout_s)


opened: weakref.WeakSet[BackgroundCompiler[Any]] = weakref.WeakSet()


@atexit.register
def end_compilations() -> None:
    """A thread that is inside PyTorch when the interpreter ends would abort the process."""
    for compiler in [*opened]:
        compiler._end(EXIT_TIMEOUT_S)


def summary(error: BaseException) -> str:
    """The first lines of a compiler's long message; its hints are left out for the place that they are about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Explanation:", "Hint:"))]
    return " ".join((told or lines)[:3])[:500] or repr(error)
