"""Mistakes in what a handler returns: one sentence with what was found, what was expected, and the remedy."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Set, ValuesView
from typing import Any

from flambeau.worker.code_places import describe_value, shorten

NO_CHUNK = "yielded None, expected text, bytes or JSON. Yield only what is to be sent; `return` ends a stream"


def explain_type(result: Any, count: int, verb: str) -> str:
    """Why a result that is no list is rejected; begins with the verb, so that the place can precede it."""
    expected = f"a list with {count} element{'s, one for each request of the batch' if count > 1 else ''}"
    remedy = remedy_for(result, count) if verb == "returned" else "Put one chunk for each row of data into a list"
    return f"{verb} {describe_value(result)}, expected {expected}. {remedy}"


def explain_count(found: int, count: int, verb: str) -> str:
    where, expected = f"a batch of {count} requests", f"{count}, one for each request"
    remedy = "Make the list from the rows: [answer(row) for row in data]"
    if count == 1:
        where, expected, remedy = "1 request", "1", "Put the whole result into a list of its own: [result]"
    return f"{verb} a list of {found} for {where}, expected {expected}. {remedy}"


def remedy_for(result: Any, count: int) -> str:
    if result is None:
        return "Is a return statement missing? Every path of the code needs one"
    if inspect.iscoroutine(result):
        result.close()  # else Python warns of it, in words that lead nowhere
        return "Await it in an `async def handle`"
    if inspect.isasyncgen(result):
        return "Write `async def handle`, with `yield` in it"
    if hasattr(result, "tolist"):
        return "Return result.tolist(); its first dimension must be the batch"
    if isinstance(result, (tuple, Set, ValuesView)) or hasattr(result, "__next__"):
        return "Return list(result)"
    return "Return [result]" if count == 1 else "Return [answer(row) for row in data]"


def explain_value(value: Any, error: BaseException) -> str:
    """Where in an element something has no JSON, and what it is."""
    if isinstance(error, RecursionError) or "Circular reference" in str(error):
        found = "a value that contains itself" if isinstance(error, ValueError) else "a value that is nested too deeply"
        return (
            f"returned {found} at result, which has no JSON form. Return plain lists and dicts without references back"
        )
    path, culprit = find_culprit(value, "result", 0)
    reason = str(error) if isinstance(error, ValueError) else ""
    remedy = "Convert it to numbers, text, lists or dicts, or return bytes and set the content type"
    if inspect.isawaitable(culprit):
        if inspect.iscoroutine(culprit):
            culprit.close()
        remedy = "Await it in an `async def handle`: await asyncio.gather(*calls)"
    if isinstance(culprit, Mapping):
        keys = ", ".join(sorted({type(key).__name__ for key in culprit if type(key) is not str}))
        return f"returned a dict with keys of the type {keys} at {path}, which JSON does not have. Use str(key)"
    kind = type(culprit)
    return (
        f"returned {kind.__module__}.{kind.__qualname__} at {path}, which has no JSON form"
        f"{f' ({shorten(reason)})' if reason else ''}. {remedy}"
    )


def explain_oddity(value: Any) -> str:
    """What is sent, and is probably not meant: None, or numbers that JSON does not have; empty for anything else."""
    if value is None:
        return (
            "the handler returned None for a request, which is sent as `null`. Is a return statement missing in the "
            "function that makes one answer?"
        )
    if is_encodable(value, allow_nan=False):
        return ""
    path, found = find_culprit(value, "result", 0, allow_nan=False)
    return (
        f"the handler returned {found} at {re.sub(r'[0-9]+', '…', path)}, which JSON does not have, so that many "
        "clients cannot parse the reply. Return None or a number instead"
    )


def find_culprit(value: Any, path: str, depth: int, *, allow_nan: bool = True) -> tuple[str, Any]:
    """The innermost value that cannot be encoded, and the path to it."""
    if depth < 20 and isinstance(value, Mapping):
        if not all(key is None or isinstance(key, (str, int, float)) for key in value):
            return path, value
        inner: Iterator[tuple[str, Any]] = ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif depth < 20 and isinstance(value, (list, tuple)):
        inner = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    else:
        return path, value
    for where, item in inner:
        if not is_encodable(item, allow_nan=allow_nan):
            return find_culprit(item, where, depth + 1, allow_nan=allow_nan)
    return path, value


def is_encodable(value: Any, *, allow_nan: bool = True) -> bool:
    try:
        json.dumps(value, default=to_plain, allow_nan=allow_nan)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def to_plain(value: Any) -> Any:
    """Arrays and tensors as lists, their scalars as numbers; for the JSON encoders, which raise for anything else."""
    if callable(to_list := getattr(value, "tolist", None)) and hasattr(value, "dtype"):
        return to_list()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
