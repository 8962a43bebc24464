"""BlockingCallMonitor: finds calls in an `async def` handler that block its event loop."""

from __future__ import annotations

import asyncio
import linecache
import logging
import os
import sys
import threading
import time
from collections.abc import Sized
from types import FrameType

from flambeau.worker.code_places import is_own

logger = logging.getLogger(__name__)

LIMIT_S = 1.0
INTERVAL_S = 0.25  # between two looks at a loop that is busy; an idle one is not looked at


class BlockingCallMonitor:
    """Asks the loop for a sign of life from a thread while jobs run, and names the line that keeps it busy, once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, jobs: Sized, limit_s: float = LIMIT_S) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._jobs = jobs
        self._has_jobs = threading.Event()
        self._has_turned = threading.Event()
        self._named: set[str] = set()

    def start(self) -> None:
        """Watch the loop of this thread until the process exits."""
        thread = threading.Thread(target=self._run, args=(threading.get_ident(),), daemon=True, name="blocking-calls")
        thread.start()

    def on_job(self) -> None:
        """A job begins; called in the thread of the loop."""
        if not self._has_jobs.is_set():
            self._has_jobs.set()

    def _run(self, loop_thread: int) -> None:
        while True:
            self._has_jobs.wait()
            if not self._jobs:
                self._has_jobs.clear()
                if not self._jobs:  # none has begun meanwhile
                    continue
                self._has_jobs.set()
            self._has_turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._has_turned.set)
            except RuntimeError:  # the loop is closed
                return
            if not self._has_turned.wait(self._limit_s):
                self._warn(sys._current_frames().get(loop_thread))
                self._has_turned.wait()
            time.sleep(INTERVAL_S)

    def _warn(self, frame: FrameType | None) -> None:
        text = explain_blocking(frame, self._limit_s)
        if text and text not in self._named:
            self._named.add(text)
            logger.warning("%s", text)


def explain_blocking(frame: FrameType | None, limit_s: float = LIMIT_S) -> str:
    """The innermost line of the author's code that runs; empty if none does."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, line).strip()
    return (
        f"{frame.f_code.co_name} ({os.path.basename(file)}:{line}) blocks the event loop for more than {limit_s:g} s: "
        f"`{source}`. All other requests of this worker wait meanwhile. Run it in a thread: "
        "await asyncio.to_thread(…), use an asynchronous library, or write `def handle` without async"
    )
