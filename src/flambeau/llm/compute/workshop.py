"""Workshop: makes what computes steps quicker, beside the steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable

from torch import Tensor

from flambeau.llm.compute.step_inputs import StepInputs

log = logging.getLogger(__name__)

Decode = Callable[[StepInputs], Tensor]  # → the logits [T, V] of every token
Make = Callable[[], Decode]

CLOSING_S = 1.0


class Workshop:
    """One thread that makes things beside the steps, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._asked: set[Hashable] = set()
        self._made: dict[Hashable, Decode] = {}
        self._orders: queue.SimpleQueue[tuple[Hashable, Make] | None] = queue.SimpleQueue()
        self._is_idle = threading.Condition()
        self._num_open = 0
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def find(self, key: Hashable, make: Make) -> Decode | None:
        """What was made under this key; None while it is being made, which is begun when it is first asked for."""
        made = self._made.get(key)
        if made is None and key not in self._asked and not self._has_failed:
            self._asked.add(key)
            with self._is_idle:
                self._num_open += 1
            self._orders.put((key, make))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="compiling", daemon=True)
                self._thread.start()
        return made

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            key, make = order
            try:
                if not self._has_failed:
                    self._made[key] = make()
            except Exception as error:
                # Steps go on as they are; where nothing was ever made, the next would fail, too.
                self._has_failed = self._has_failed or not self._made
                log.warning("decoding is not compiled, and slower for it: %s", summary(error))
                log.debug("compilation failed", exc_info=True)
            del order, make  # else this thread would be the one to free the model, perhaps as the process ends
            with self._is_idle:
                self._num_open -= 1
                self._is_idle.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was asked for is made or has failed."""
        with self._is_idle:
            return self._is_idle.wait_for(lambda: self._num_open == 0, timeout_s)

    def close(self) -> None:
        """Make nothing more. What takes long is left to its thread, which ends with the process at the latest."""
        self._has_failed = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING_S)  # a thread that Python's end finds within PyTorch takes the process down


def summary(error: BaseException) -> str:
    """The first lines of a compiler's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or repr(error)
