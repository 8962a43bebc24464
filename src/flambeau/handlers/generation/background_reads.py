"""BackgroundReads: requests that are read in threads, beside the engine's steps."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from flambeau.wire.messages import Part

LONG_BYTES = 16 << 10  # of a request that is read beside the steps: a few milliseconds

Lane = Literal["short", "long", "files"]
StepResult = Part | tuple[int, Exception]  # a part, or a job that failed alone


class ReadThread:
    """Calls functions in a thread, one after another. Tenants take turns."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Callable[[], Any], Future[Any]]] = []  # turn, order of arrival, …
        self._serials = itertools.count()
        self._num_left = 0  # calls that wait or run
        self._turn = 0  # of the call that began last
        self._last_turns: dict[str, int] = {}  # of each tenant's last call

    def submit(self, call: Callable[[], Any], tenant: str) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if not self._num_left:
                self._last_turns.clear()
            self._num_left += 1
            turn = max(self._turn, self._last_turns.get(tenant, -1) + 1)
            self._last_turns[tenant] = turn
            heapq.heappush(self._waiting, (turn, next(self._serials), call, future))
        self._executor.submit(self._call_next)
        return future

    def _call_next(self) -> None:
        with self._lock:
            self._turn, _, call, future = heapq.heappop(self._waiting)
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            self._num_left -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class BackgroundReads:
    """Reads requests in threads, beside the steps.

    Tokenizing a long prompt takes as long as many steps; tokenizers release Python's lock meanwhile. While one is
    read, short ones have a thread of their own: the thread of the steps never waits for a tokenizer. So have files,
    which may take a minute.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[str, ReadThread] = {}  # made when they are needed
        self._reads: dict[int, tuple[Future[Any], Callable[[Any], StepResult | None], threading.Event]] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._reads)

    def is_for(self, size_bytes: int) -> bool:
        return size_bytes >= LONG_BYTES or bool(self._reads)

    @staticmethod
    def lane_of(size_bytes: int, *, has_clips: bool) -> Lane:
        return "files" if has_clips else "long" if size_bytes >= LONG_BYTES else "short"

    def submit(
        self,
        job_id: int,
        read: Callable[[], Any],
        finish: Callable[[Any], StepResult | None],
        cancelled: threading.Event | None = None,
        *,
        lane: Lane,
        tenant: str = "",
    ) -> None:
        """Call `read` in the thread of a lane, and then `finish` with its result between two steps.

        `cancelled` is set when the result is no longer needed.
        """
        name = f"{self._name}-{lane}"
        if name not in self._threads:
            self._threads[name] = ReadThread(name)
        future = self._threads[name].submit(read, tenant)
        self._reads[job_id] = (future, finish, cancelled or threading.Event())

    def forget(self, job_id: int) -> None:
        """Drop a job that was cancelled."""
        if (found := self._reads.pop(job_id, None)) is not None:
            found[0].cancel()
            found[2].set()

    def finish(self, wait_s: float) -> list[StepResult]:
        """Finish the jobs that are read; without any, wait a moment for one."""
        wait([future for future, _, _ in self._reads.values()], wait_s, FIRST_COMPLETED)
        results: list[StepResult] = []
        for job_id, (future, finish, _) in [*self._reads.items()]:
            if not future.done():
                continue
            del self._reads[job_id]
            try:
                result = finish(future.result())
            except Exception as error:
                results.append((job_id, error))
            else:
                results += [] if result is None else [result]
        return results

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
