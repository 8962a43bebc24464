"""StageObserver: the time of each stage of a handler, and a description of what it returns."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flambeau.worker.loader import LoadedHandler

STAGES = ("preprocess", "inference", "postprocess")
REST = "rest of handle"
MAX_KEYS = 6  # of a mapping in a description
MAX_DEPTH = 3


@dataclass(slots=True)
class Stage:
    """One stage in one call; its time excludes stages that it calls."""

    name: str
    seconds: float = 0.0
    calls: int = 0
    output: str = ""


@dataclass(frozen=True, slots=True)
class CallProfile:
    """One call of `handle`: its stages and the rest, which add up to the whole."""

    stages: list[Stage] = field(default_factory=list)
    rest: Stage = field(default_factory=lambda: Stage(REST))

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages) + self.rest.seconds


class StageObserver:
    """Wraps the stages of one handler to time them; only for processes without other calls."""

    def __init__(self) -> None:
        self.call = CallProfile()
        self._inner_s: list[float] = []  # for each open stage: the time spent in stages inside it

    def observe(self, loaded: LoadedHandler) -> LoadedHandler:
        """The handler, observed; stages are timed only if it has all three."""
        handler = loaded.handler
        if handler is not None and all(callable(getattr(handler, name, None)) for name in STAGES):
            for name in STAGES:
                try:
                    setattr(handler, name, self._wrap(getattr(handler, name), functools.partial(self._stage, name)))
                except AttributeError:  # __slots__ without room for them
                    break
        return replace(loaded, handle=self._wrap(loaded.handle, lambda: self.call.rest))

    def begin(self) -> None:
        """Start the profile of the next call."""
        self.call = CallProfile()
        self._inner_s.clear()

    def _stage(self, name: str) -> Stage:
        found = next((stage for stage in self.call.stages if stage.name == name), None)
        if found is None:
            found = Stage(name)
            self.call.stages.append(found)
        return found

    def _wrap(self, function: Callable[..., Any], find: Callable[[], Stage]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def observed_async(*args: Any, **kwargs: Any) -> Any:
                stage = find()
                with self._timing(stage):
                    result = await function(*args, **kwargs)
                return self._note(stage, result)

            return observed_async

        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            stage = find()
            with self._timing(stage):
                result = function(*args, **kwargs)
            return self._note(stage, result)

        return observed

    def _note(self, stage: Stage, result: Any) -> Any:
        """Describe a result; a generator is timed while it is consumed."""
        began = time.perf_counter()
        stage.calls += 1
        stage.output = describe(result)
        if self._inner_s:  # do not count our own work
            self._inner_s[-1] += time.perf_counter() - began
        if inspect.isgenerator(result):
            return self._each(stage, result)
        if inspect.isasyncgen(result):
            return self._each_async(stage, result)
        if type(result) is list and any(map(inspect.isgenerator, result)):
            return [self._each(stage, item) if inspect.isgenerator(item) else item for item in result]
        return result

    def _each(self, stage: Stage, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._timing(stage):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    async def _each_async(self, stage: Stage, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            with self._timing(stage):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item

    @contextmanager
    def _timing(self, stage: Stage) -> Iterator[None]:
        began = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            wait_for_device()
            elapsed = time.perf_counter() - began
            stage.seconds += elapsed - (self._inner_s.pop() if self._inner_s else 0.0)
            if self._inner_s:
                self._inner_s[-1] += elapsed


def wait_for_device() -> None:
    """Wait for launched kernels, so that their time counts for the stage that launched them."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()


def device_of(handler: Any) -> str:
    """The device of a handler or of its model's parameters; empty if unknown."""
    device = getattr(handler, "device", None)
    if device is None and callable(parameters := getattr(getattr(handler, "model", None), "parameters", None)):
        try:
            device = getattr(next(iter(parameters()), None), "device", None)
        except Exception:  # not a torch module
            return ""
    return str(device) if device is not None else ""


# ---- descriptions of values; torch is not needed ----


def describe(value: Any, depth: int = 0) -> str:
    """`Tensor float32 (2, 3) cpu`, `list of 2 dict`, `bytearray 13.2 kB`, …"""
    name = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, complex)):
        return "None" if value is None else f"{name} {value}"
    if isinstance(value, str):
        return f"{name} of {len(value)} characters"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{name} {size_text(memoryview(value).nbytes)}"
    if is_array(value):
        return describe_array(value)
    if isinstance(value, Mapping):
        return describe_mapping(value, depth)
    if isinstance(value, (Sequence, Set)):
        return f"{name} of {len(value)}{describe_items([*value])}"
    return describe_picture(value) or name


def describe_array(value: Any) -> str:
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    device = str(getattr(value, "device", ""))
    words = [type(value).__name__, kind, str(tuple(value.shape)), device]
    return " ".join(word for word in words if word)


def describe_mapping(value: Mapping[Any, Any], depth: int) -> str:
    """Each value if arrays are inside, else only the keys."""
    name, shown = type(value).__name__, [*value][:MAX_KEYS]
    more = ", …" if len(value) > MAX_KEYS else ""
    if depth < MAX_DEPTH and has_array(value, MAX_DEPTH - depth):
        inner = ", ".join(f"{key}: {describe(value[key], depth + 1)}" for key in shown)
        return f"{'' if name == 'dict' else f'{name} '}{{{inner}{more}}}"
    keys = ", ".join(str(key)[:20] for key in shown)
    return f"{name} of {len(value)}" + (f" ({keys}{more})" if keys else "")


def describe_items(items: Sequence[Any]) -> str:
    """The common type of the items, with the shape of arrays."""
    kinds = sorted({type(item).__name__ for item in items})
    if len(kinds) != 1:
        return f" ({', '.join(kinds[:MAX_KEYS])})" if kinds else ""
    if is_array(items[0]) and len(texts := {describe_array(item) for item in items}) == 1:
        return f" {texts.pop()}"
    return f" {kinds[0]}"


def describe_picture(value: Any) -> str:
    """Mode and size of a PIL image; empty for anything else."""
    mode, size = getattr(value, "mode", None), getattr(value, "size", None)
    if isinstance(mode, str) and isinstance(size, tuple) and len(size) == 2:
        return f"{type(value).__name__} {mode} {size[0]}×{size[1]}"
    return ""


def is_array(value: Any) -> bool:
    """Whether a value has a shape, as the tensors and arrays of all libraries do."""
    return isinstance(getattr(value, "shape", None), tuple)


def has_array(value: Any, depth: int) -> bool:
    """Whether a value is an array, or a mapping with one at most `depth` levels down."""
    if isinstance(value, Mapping) and depth > 0:
        return any(has_array(item, depth - 1) for item in [*value.values()][:MAX_KEYS])
    return is_array(value)


def size_text(size_bytes: int) -> str:
    """`812 B`, `13.2 kB`, `4.0 MB`."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size, unit = size_bytes / 1000, "kB"
    for unit in ("kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.1f} {unit}"
