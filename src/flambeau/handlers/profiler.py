"""Times of a handler's stages as metrics (`timed`), and the torch profiler around a batch."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.profiler import profile

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
TRACE_FOLDER = Path("/tmp/pytorch_profiler")  # existing scripts look for traces there


def timed(method: Callable[P, T]) -> Callable[P, T]:
    """Report a method's duration as the metric `ts_handler_<name>` if model-config.yaml has `handler: {profile: true}`.

    The handler must keep its context in `self.context`, as BaseHandler does.
    """

    @functools.wraps(method)
    def measured(*args: P.args, **kwargs: P.kwargs) -> T:
        context: Any = getattr(args[0], "context", None)
        if context is None or not is_timing_enabled(context):
            return method(*args, **kwargs)
        began = time.perf_counter()
        result = method(*args, **kwargs)
        synchronize_device()
        elapsed_ms = round((time.perf_counter() - began) * 1000, 2)
        context.metrics.add_time(f"ts_handler_{method.__name__}", elapsed_ms, None, "ms")
        return result

    return measured


def is_timing_enabled(context: Any) -> bool:
    options = (context.model_yaml_config or {}).get("handler")
    return isinstance(options, dict) and bool(options.get("profile"))


def synchronize_device() -> None:
    # A GPU call returns before its work is done.
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def is_profiler_enabled() -> bool:
    return bool(os.environ.get("ENABLE_TORCH_PROFILER"))


class ProfiledHandler(Protocol):
    """A handler whose stages can be profiled one by one."""

    manifest: Mapping[str, Any] | None
    profiler_args: dict[str, Any]

    def preprocess(self, data: Any, /) -> Any: ...
    def inference(self, data: Any, /) -> Any: ...
    def postprocess(self, data: Any, /) -> Any: ...
    def explain_handle(self, data_preprocess: Any, raw_data: Any, /) -> Any: ...


def run_with_profiler(handler: ProfiledHandler, data: Sequence[Any], *, is_explain: bool) -> tuple[Any, profile]:
    """Run a batch under the torch profiler; write a trace file per batch and log a summary table."""
    from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

    name = ((handler.manifest or {}).get("model") or {}).get("modelName") or "model"
    arguments = {
        "activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
        "record_shapes": True,
        "on_trace_ready": tensorboard_trace_handler(str(TRACE_FOLDER / name)),
        **handler.profiler_args,
    }
    with profile(**arguments) as profiler:
        with record_function("preprocess"):
            inputs = handler.preprocess(data)
        if is_explain:
            with record_function("explain"):
                output = handler.explain_handle(inputs, data)
        else:
            with record_function("inference"):
                raw = handler.inference(inputs)
            with record_function("postprocess"):
                output = handler.postprocess(raw)
    logger.info("%s", profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    return output, profiler
