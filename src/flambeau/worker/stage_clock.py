"""StageClock: how long the stages of a served handler take. PauseLog: what else the process did meanwhile."""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

STAGES = ("preprocess", "inference", "postprocess")
MIN_PAUSE_S = 0.001  # shorter ones explain nothing
MAX_PAUSES = 32  # that are kept

Pause = tuple[str, float, float]  # what, when it began, seconds


class StageClock:
    """Adds up the times of the stages since the last `take`; unlike StageObserver it does not wait for the device.

    Only for handlers whose calls do not overlap.
    """

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0, 0.0]

    def watch(self, handler: Any) -> None:
        """Time the stages of a handler, if it has all three and they are plain methods."""
        stages = [getattr(handler, name, None) for name in STAGES]
        if not all(callable(stage) and not inspect.iscoroutinefunction(stage) for stage in stages):
            return
        try:
            for i, stage in enumerate(stages):
                setattr(handler, STAGES[i], TimedStage(stage, self._seconds, i))  # type: ignore[arg-type]
        except AttributeError:  # __slots__ without room for them
            return

    def take(self, preprocess_s: float | None = None) -> tuple[float, float, float] | None:
        """The seconds of each stage since the last call; those of the first as given, if so. None: none ran."""
        seconds = self._seconds
        if preprocess_s is None:
            preprocess_s, seconds[0] = seconds[0], 0.0
        _, inference_s, postprocess_s = seconds
        if not (preprocess_s or inference_s or postprocess_s):
            return None
        seconds[1] = seconds[2] = 0.0
        return preprocess_s, inference_s, postprocess_s

    def take_preprocess(self) -> float:
        """The seconds of `preprocess` alone, where another thread runs the other stages."""
        seconds, self._seconds[0] = self._seconds[0], 0.0
        return seconds


class TimedStage:
    """A method of a handler that adds its time to a list. It stands for the method in every other respect."""

    __slots__ = ("_index", "_seconds", "_stage")

    def __init__(self, stage: Callable[..., Any], seconds: list[float], index: int) -> None:
        self._stage = stage
        self._seconds = seconds
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._stage(*args, **kwargs)
        finally:
            self._seconds[self._index] += time.perf_counter() - began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._stage

    def __reduce__(self) -> Any:  # a handler that is copied or sent to another process takes its own method along
        return self._stage.__reduce__()


class PauseLog:
    """Garbage collections and compilations of this process, as far as they take noticeable time."""

    def __init__(self) -> None:
        self.pauses: deque[Pause] = deque(maxlen=MAX_PAUSES)
        self._began: dict[str, float] = {}

    def start(self) -> None:
        """Watch the garbage collector, and torch's compiler where it is loaded."""
        gc.callbacks.append(self._on_collection)
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None:
            handler.register_start_callback(lambda *_: self.begin("compilation"))
            handler.register_end_callback(lambda *_: self.end("compilation"))

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:  # the others take microseconds, and are many
            return
        if phase == "start":
            self.begin("garbage collection")
        else:
            self.end("garbage collection")

    def begin(self, what: str) -> None:
        self._began[what] = time.monotonic()

    def end(self, what: str) -> None:
        began = self._began.pop(what, None)
        if began is not None and (seconds := time.monotonic() - began) >= MIN_PAUSE_S:
            self.pauses.append((what, began, seconds))

    def since(self, began: float) -> list[Pause] | None:
        """What ended after a point in time; None if nothing did."""
        if not self.pauses:
            return None
        return [pause for pause in self.pauses if pause[1] + pause[2] > began] or None
