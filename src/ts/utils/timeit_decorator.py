"""What handlers import from `ts.utils.timeit_decorator`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def timeit(func: Function) -> Function:
    """Print how long each call takes, by the clock and of the CPU."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began, began_cpu = time.perf_counter(), time.process_time()
        result = func(*args, **kwargs)
        took, took_cpu = time.perf_counter() - began, time.process_time() - began_cpu
        print(f"func: {func.__name__!r} took a total of {took:.4f} sec to run and {took_cpu:.4f} sec of CPU time")
        return result

    return wrapper  # type: ignore[return-value]
