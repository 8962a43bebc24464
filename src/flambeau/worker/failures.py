"""Exception → Failed: which status, what the client is told, and what the log keeps."""

from __future__ import annotations

import traceback

from flambeau.errors import BadRequest, PredictionException
from flambeau.wire.messages import Failed
from flambeau.worker.replies import BadResult

OUT_OF_MEMORY = 507


def to_failed(job_ids: list[int], error: BaseException) -> Failed:
    """The failure of jobs, with TorchServe's statuses and texts."""
    if isinstance(error, PredictionException):  # an answer, not an accident
        status = int(error.error_code)
        return Failed(job_ids, OUT_OF_MEMORY if status == 413 else status, printable(str(error.message)))
    if isinstance(error, BadRequest):
        return Failed(job_ids, 400, str(error))
    detail = printable("".join(traceback.format_exception(error)))
    if is_out_of_memory(error):
        return Failed(job_ids, OUT_OF_MEMORY, "Out of resources", detail)
    if isinstance(error, BadResult):
        return Failed(job_ids, 503, str(error), detail)
    return Failed(job_ids, 503, "Prediction failed", detail)


def load_failed(error: BaseException) -> Failed:
    """The failure to load a model; the text names the error, since only operators see it."""
    status = OUT_OF_MEMORY if is_out_of_memory(error) else 500
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failed([], status, printable(summary), printable("".join(traceback.format_exception(error))))


def printable(text: str) -> str:
    """Text that can be sent, whatever an exception was made of."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    """TorchServe calls any error that mentions CUDA out of memory; clients rely on the status."""
    return isinstance(error, MemoryError) or "CUDA" in str(error)
