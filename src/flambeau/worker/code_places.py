"""Places in the author's code: the lines of a traceback, and where functions begin, as `handler.py:12`."""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

LIBRARY_FOLDERS = (  # files below these are not the author's code
    os.path.dirname(os.path.dirname(__file__)),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")),
    "<",  # frozen modules
)
MAX_SHOWN = 160
STAGES = ("preprocess", "inference", "postprocess")


def is_own(filename: str) -> bool:
    """Whether a file is the author's, and not one of a library."""
    return not filename.startswith(LIBRARY_FOLDERS) and "/site-packages/" not in filename


def with_text(error: BaseException) -> BaseException:
    """The exception, or one in its place if it has no text because its own `__str__` raises."""
    try:
        str(error)
    except Exception as reason:
        kind = type(error)
        shown = ExceptionWithoutText(
            f"{kind.__name__}, whose __str__{f' ({place})' if (place := definition(kind.__str__)) else ''} raises "
            f"{type(reason).__name__}"
        )
        return shown.with_traceback(error.__traceback__)
    return error


class ExceptionWithoutText(Exception):
    """Stands for an exception whose text cannot be made."""

    __module__ = "builtins"  # tracebacks show the name alone


def source_line(error: BaseException) -> str:
    """The innermost line of the author's code in a traceback, as `handler.py:12`; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def place_of(handle: Callable[..., Any]) -> str:
    """What returned a handler's result, as `handle (handler.py:7)`: its postprocess, if only that is the author's."""
    handle = inspect.unwrap(handle)
    owner = getattr(handle, "__self__", None)
    inner = vars(owner).values() if hasattr(owner, "__dict__") else ()  # an envelope holds the handler's `handle`
    for function in (handle, *(getattr(owner, name, None) for name in reversed(STAGES)), *inner):
        code = code_of(function)
        if code is not None and is_own(code.co_filename):
            return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return "handle"


def code_of(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


def definition(function: Any) -> str:
    """`handler.py:7`, where a function begins; empty if it is not the author's."""
    code = code_of(function)
    if code is None or not is_own(code.co_filename):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def first_line(error: BaseException) -> str:
    """The exception's type and message, shortened to one line."""
    notes = sum(note.count("\n") + 1 for note in getattr(error, "__notes__", ()))  # they follow the message
    return shorten(traceback.format_exception_only(error)[-1 - notes])


def shorten(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}…"


def with_place(error: BaseException) -> str:
    place = source_line(error)
    return f"{first_line(error)}{f' ({place})' if place else ''}"


def is_handler(value: Any) -> bool:
    return callable(getattr(value, "handle", None)) and callable(getattr(value, "initialize", None))


def traces_of(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def frames_of(error: BaseException) -> Iterator[FrameType]:
    for trace in traces_of(error):
        yield trace.tb_frame


def lines_of(error: BaseException) -> Iterator[tuple[FrameType, str]]:
    """Each frame of a traceback with the line it was at."""
    for trace in traces_of(error):
        frame = trace.tb_frame
        yield frame, linecache.getline(frame.f_code.co_filename, trace.tb_lineno)


def describe_value(value: Any) -> str:
    from flambeau.worker.stage_timings import describe  # loaded for mistakes only

    return describe(value)
