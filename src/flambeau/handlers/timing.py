"""`timed`: how long each stage of a handler takes, as a metric, when the model-config asks for it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def timed(method: Callable[P, T]) -> Callable[P, T]:
    """Measure a handler's method as the gauge ts_handler_<name>, if its model-config has `handler: {profile: true}`."""

    @functools.wraps(method)
    def measured(*args: P.args, **kwargs: P.kwargs) -> T:
        context: Any = getattr(args[0], "context", None)
        if context is None or not is_wanted(context):
            return method(*args, **kwargs)
        began = time.perf_counter()
        result = method(*args, **kwargs)
        finish_device_work()
        elapsed_ms = round((time.perf_counter() - began) * 1000, 2)
        context.metrics.add_time(f"ts_handler_{method.__name__}", elapsed_ms, None, "ms")
        return result

    return measured


def is_wanted(context: Any) -> bool:
    """Whether a model-config has `handler: {profile: true}`."""
    options = (context.model_yaml_config or {}).get("handler")
    return isinstance(options, dict) and bool(options.get("profile"))


def finish_device_work() -> None:
    """A GPU call returns before its work is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
