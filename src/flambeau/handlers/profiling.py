"""The torch profiler around one batch, when ENABLE_TORCH_PROFILER is set."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

if TYPE_CHECKING:
    from flambeau.handlers.base import BaseHandler

logger = logging.getLogger(__name__)

FOLDER = Path("/tmp/pytorch_profiler")  # where TorchServe's users look for traces


def is_wanted() -> bool:
    """Whether the environment asks for profiles."""
    return bool(os.environ.get("ENABLE_TORCH_PROFILER"))


def infer_with_profiler(handler: BaseHandler, data: Sequence[Any]) -> tuple[Any, profile]:
    """Run a batch under the profiler: a trace file for each, and a table in the log."""
    name = ((handler.manifest or {}).get("model") or {}).get("modelName") or "model"
    arguments = {
        "activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
        "record_shapes": True,
        "on_trace_ready": tensorboard_trace_handler(str(FOLDER / name)),
        **handler.profiler_args,
    }
    with profile(**arguments) as profiler:
        with record_function("preprocess"):
            inputs = handler.preprocess(data)
        if handler._is_explain():
            with record_function("explain"):
                output = handler.explain_handle(inputs, data)
        else:
            with record_function("inference"):
                raw = handler.inference(inputs)
            with record_function("postprocess"):
                output = handler.postprocess(raw)
    logger.info("%s", profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    return output, profiler
