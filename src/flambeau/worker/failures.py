"""Exception → Failed: which status, what the client is told, and what the log keeps."""

from __future__ import annotations

import traceback

from flambeau.errors import BadRequest, PredictionException
from flambeau.wire.messages import Failed
from flambeau.worker.replies import BadResult

OUT_OF_MEMORY = 507
MAX_CHARACTERS = 16_000


def to_failed(job_ids: list[int], error: BaseException) -> Failed:
    """The failure of jobs, with TorchServe's statuses and texts."""
    if isinstance(error, PredictionException):  # an answer, not an accident
        return Failed(job_ids, status_of(error), printable(str(error.message)))
    if isinstance(error, BadRequest):
        # What made it a bad request tells the handler's author more than the client was told.
        detail = printable("".join(traceback.format_exception(error.__cause__))) if error.__cause__ else ""
        return Failed(job_ids, 400, printable(str(error)), detail)
    detail = printable("".join(traceback.format_exception(error)))
    if is_out_of_memory(error):
        return Failed(job_ids, OUT_OF_MEMORY, "Out of resources", detail)
    if isinstance(error, BadResult):
        return Failed(job_ids, 503, str(error), detail)
    return Failed(job_ids, 503, "Prediction failed", detail)


def load_failed(error: BaseException, *, may_change: bool = False) -> Failed:
    """The failure to load a model; the text names the error, since only operators see it.

    An error that is final by its own word is its text alone, in one line; none is where the model's files
    `may_change` at any time.
    """
    status = OUT_OF_MEMORY if is_out_of_memory(error) else 500
    detail = printable("".join(traceback.format_exception(error)))
    words = " ".join(str(error).split())
    if words and not may_change and is_final(error):
        return Failed([], status, printable(words), detail, is_final=True)
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failed([], status, printable(summary), detail)


def is_final(error: BaseException) -> bool:
    """Whether an error says of itself that another try would end the same; memory may be free by then."""
    return getattr(error, "is_final", False) is True and not is_out_of_memory(error)


def status_of(error: PredictionException) -> int:
    """The status a handler asked for; TorchServe sends 413 as 507, and what is no number as 500."""
    try:
        status = int(error.error_code)
    except (TypeError, ValueError):
        return 500
    return OUT_OF_MEMORY if status == 413 else status


def printable(text: str) -> str:
    """Text that can be sent, whatever an exception was made of; of a long one, the end."""
    return text[-MAX_CHARACTERS:].encode("utf-8", "backslashreplace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    """TorchServe calls any error that mentions CUDA out of memory; clients rely on the status."""
    return isinstance(error, MemoryError) or "CUDA" in str(error)
