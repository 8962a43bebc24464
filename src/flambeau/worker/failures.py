"""Exception → Failed: the status, the text for the client, and the detail for the log."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

from flambeau.archive.packages import EXTRAS, explain_missing, is_installed
from flambeau.errors import BadRequest, InvalidField, PredictionException
from flambeau.wire.messages import Failed
from flambeau.worker.code_mistakes import locate
from flambeau.worker.code_places import is_own, shorten, source_line, with_place, with_text
from flambeau.worker.handler_mistakes import explain_exception, explain_exit, lacks_gpu
from flambeau.worker.load_mistakes import explain_import
from flambeau.worker.request_mistakes import lacking_key
from flambeau.worker.results import BadResult

HOME = Path(__file__).parents[1]  # the folder of this package
HIDDEN = (f"{HOME}{os.sep}", "<frozen importlib")  # calls that tell an author nothing
OUT_OF_MEMORY = 507
MAX_CHARACTERS = 16_000
_NO_MEMORY = re.compile(  # of torch, cuBLAS, cuDNN, NCCL and the allocator of the CPU
    r"(CUDA|HIP|XPU|MPS|NCCL|cuDNN).{0,80}out of memory|_ALLOC_FAILED|DefaultCPUAllocator: (can't|not enough)",
    re.IGNORECASE | re.DOTALL,
)
WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # does not pass by itself


def to_failed(job_ids: list[int], error: BaseException) -> Failed:
    """The failure of jobs; existing clients rely on these statuses and texts."""
    error = with_text(error)
    if isinstance(error, PredictionException):  # the handler chose this reply
        return Failed(job_ids, status_of(error), printable(str(error.message)), explain_swapped(error))
    if isinstance(error, BadRequest):
        # The cause is for the handler's author; the client gets the message only.
        detail = to_detail(error.__cause__, locate) if error.__cause__ else ""
        field = printable(error.field) if isinstance(error, InvalidField) else ""
        return Failed(job_ids, 400, printable(str(error)), detail, is_bad_request=True, field=field)
    detail = to_detail(error, locate)
    if is_out_of_memory(error):
        return Failed(job_ids, OUT_OF_MEMORY, "Out of resources", detail, reason=printable(with_place(error)))
    if isinstance(error, BadResult):
        reason = explain(error) if error.advice else error.place  # the message itself is the advice
        return Failed(job_ids, 503, str(error), detail, reason=printable(reason))
    reason = ": ".join(filter(None, (with_place(error), lacking_key(error))))
    return Failed(job_ids, 503, "Prediction failed", detail, reason=printable(reason))


def to_detail(error: BaseException, otherwise: Callable[[BaseException], str] = lambda _: "") -> str:
    """The mistake in one sentence, if it is a known one, and the traceback, if it leads to the author's code.

    For one that is not known, the sentence is that of `otherwise`.
    """
    sentence = explain(error) or otherwise(error)
    if sentence and isinstance(error, BadResult) and not source_line(error):
        return printable(sentence)
    trace = printable(format_trace(error, is_explained=bool(sentence)))
    return f"{printable(sentence)}\n{trace}" if sentence else trace


def format_trace(error: BaseException, *, is_explained: bool = False) -> str:
    """The traceback. If it leads to the author's code or is explained, the calls of this package are left out."""
    whole = link = traceback.TracebackException.from_exception(error)
    while link is not None:
        if is_explained or any(is_own(frame.filename) for frame in link.stack):
            others = [frame for frame in link.stack if not frame.filename.startswith(HIDDEN)]
            link.stack = traceback.StackSummary.from_list(others)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)  # type: ignore[assignment]
    return "".join(whole.format())


def explain(error: BaseException) -> str:
    """A mistake of the handler's author in one sentence: what was found, what was expected, where, and the remedy."""
    error = with_text(error)
    if isinstance(error, BadResult):
        line = source_line(error)  # of a call such as context.send
        place = f"handle ({line})" if line else error.place or "handle"
        return f"{place} {error.advice}" if error.advice else f"{place}: {error}"
    if isinstance(error, BadRequest) and error.__cause__ is not None:  # BaseHandler names the input as the reason
        return explain_exception(error.__cause__) or with_place(error.__cause__)
    return explain_exception(error)


def is_explained(error: BaseException) -> bool:
    """Whether an error tells the client what is wrong: the handler chose its answer, or memory is short."""
    return isinstance(error, (PredictionException, BadRequest, BadResult)) or is_out_of_memory(error)


def load_failed(error: BaseException, *, folder: str = "", may_change: bool = False) -> Failed:
    """The failure to load a model. Its message names the error: only operators see it.

    A final error is reported by its own text, in one line. No error is final while the model's files, which are in
    `folder`, `may_change`.
    """
    error = with_text(error)
    status = OUT_OF_MEMORY if any(map(lacks_memory, origins(error))) else 500
    sentence = explain(error)
    detail = to_detail(error)
    text = " ".join(str(error).split())
    if not may_change and (lack := missing_package(error)):
        return Failed([], status, lack, detail, is_final=True, needs_install=True)
    if text and not may_change and is_final(error):
        return Failed([], status, printable(text), detail, is_final=True)
    if not may_change and is_in_code(error, folder):
        return Failed([], status, printable(sentence or f"{type(error).__name__}: {text}"), detail, is_final=True)
    summary = sentence or summarize(error)
    return Failed([], status, printable(summary), detail)


def summarize(error: BaseException) -> str:
    """The exception with its text and notes; its first line ends with the place in the author's code."""
    if isinstance(error, SystemExit):
        return f"{explain_exit(error)}. Raise an exception instead"
    text, place = "".join(traceback.format_exception_only(error)).strip(), source_line(error)
    head, newline, rest = text.partition("\n")
    return f"{head}{f' ({place})' if place else ''}{newline}{rest}"


def is_final(error: BaseException) -> bool:
    """Whether an error is marked final and none of its causes may pass by itself."""
    if getattr(error, "is_final", False) is not True:
        return False
    links = origins(error)
    return not any(map(lacks_memory, links)) and not any(map(may_pass, links[1:]))


def missing_package(error: BaseException) -> str:
    """Which file needs a module that is not installed, with the remedy; empty if that is not it."""
    for link in origins(error):
        if isinstance(link, ModuleNotFoundError) and link.name:
            files = [f.filename for f in traceback.extract_tb(link.__traceback__) if not f.filename.startswith("<")]
            module = link.name.partition(".")[0]
            if files and Path(files[-1]).is_relative_to(HOME):
                part = ".".join(Path(files[-1]).relative_to(HOME.parent).with_suffix("").parts)
                return explain_missing(part.removesuffix(".__init__"), [module], EXTRAS.get(module, ""))
            if files and is_own(files[-1]) and not is_installed(module):
                return explain_import(link)
    return ""


def is_in_code(error: BaseException, folder: str) -> bool:
    """Whether the model's code cannot be imported: a syntax error, or a name that another of its files lacks."""
    if isinstance(error, SyntaxError):
        return error.filename is not None and os.path.isfile(error.filename)
    if type(error) is ImportError and "relative import" in str(error):
        return bool(source_line(error))
    return type(error) is ImportError and bool(folder and error.path and Path(error.path).is_relative_to(folder))


def origins(error: BaseException) -> list[BaseException]:
    """An error and its causes, newest first, including those that `from None` hides."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is other for other in links):
        links.append(link)
        link = link.__cause__ or link.__context__
    return [*map(with_text, links)]


def may_pass(error: BaseException) -> bool:
    """Whether it is a temporary problem of a disk or a connection, and not a wrong path."""
    if not isinstance(error, OSError) or isinstance(error, WRONG_PATH):
        return False
    return error.errno != errno.EINVAL  # an offset beyond the end of a truncated file


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was short; there may be more at the next try."""
    text = str(error).lower()
    return is_out_of_memory(error) or "allocate memory" in text or "out of memory" in text


def explain_swapped(error: PredictionException) -> str:
    """`PredictionException(400, "text")`, whose status is a text; empty if the arguments are in order."""
    try:
        int(error.error_code)
    except (TypeError, ValueError):
        place = source_line(error)
        return printable(
            f"PredictionException({shorten(repr(error.message))}, {shorten(repr(error.error_code))})"
            f"{f' ({place})' if place else ''}: the status is no number, so that the answer is 500. "
            "The message comes first, then the status: PredictionException(message, 400)"
        )
    return ""


def status_of(error: PredictionException) -> int:
    """The status a handler asked for. Existing clients expect 507 for 413, and 500 for anything but a number."""
    try:
        status = int(error.error_code)
    except (TypeError, ValueError):
        return 500
    return OUT_OF_MEMORY if status == 413 else status


def printable(text: str) -> str:
    """Text that can be encoded; of a long one, the end."""
    return text[-MAX_CHARACTERS:].encode("utf-8", "backslashreplace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short. Other errors that mention CUDA are errors of the code or of the device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and not lacks_gpu(error) and _NO_MEMORY.search(str(error)) is not None
