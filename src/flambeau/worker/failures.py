"""Exception → Failed: which status, what the client is told, and what the log keeps."""

from __future__ import annotations

import errno
import traceback

from flambeau.errors import BadRequest, PredictionException
from flambeau.wire.messages import Failed
from flambeau.worker.results import BadResult

OUT_OF_MEMORY = 507
MAX_CHARACTERS = 16_000
MISPLACED = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # until somebody mends it


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
    status = OUT_OF_MEMORY if any(map(lacks_memory, origins(error))) else 500
    detail = printable("".join(traceback.format_exception(error)))
    words = " ".join(str(error).split())
    if words and not may_change and is_final(error):
        return Failed([], status, printable(words), detail, is_final=True)
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failed([], status, printable(summary), detail)


def is_final(error: BaseException) -> bool:
    """Whether an error says of itself that another try would end the same, and nothing that led to it may pass."""
    if getattr(error, "is_final", False) is not True:
        return False
    links = origins(error)
    return not any(map(lacks_memory, links)) and not any(map(may_pass, links[1:]))


def origins(error: BaseException) -> list[BaseException]:
    """An error and what led to it, newest first; also what `from None` hides, which is for readers."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is other for other in links):
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def may_pass(error: BaseException) -> bool:
    """Whether it is trouble of the system, with a disk or a connection, and not of the file that was asked for."""
    if not isinstance(error, OSError) or isinstance(error, MISPLACED):
        return False
    return error.errno != errno.EINVAL  # a place in a file that was cut off


def lacks_memory(error: BaseException) -> bool:
    """Whether a load met too little memory, which may be free at the next try."""
    words = str(error).lower()
    return is_out_of_memory(error) or "allocate memory" in words or "out of memory" in words


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
