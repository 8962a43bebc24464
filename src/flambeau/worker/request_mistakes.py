"""Mistakes in what a handler takes from a request: keys that a row lacks, bodies of other types, indices too large."""

from __future__ import annotations

import ast
import difflib
import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.worker.code_mistakes import ANSWER
from flambeau.worker.code_places import describe_value, frames_of, is_handler, is_own, shorten, with_place
from flambeau.worker.context import Context
from flambeau.worker.inputs import Form
from flambeau.worker.load_mistakes import find_context

MAX_KEYS = 12
CONTEXT_DICTS = ("model_yaml_config", "system_properties", "manifest")
PARSED = re.compile(r"the JSON object must be str, bytes or bytearray, not (\w+)")
NO_BYTES = re.compile(r"a bytes-like object is required, not '(dict|list|str|int|float|NoneType)'")
TYPES = "JSON arrives parsed, text as str, everything else as bytearray; check the type with isinstance"


def explain_item(error: BaseException) -> str:
    """A key that a request does not have, or a body of another type than the code expects."""
    if isinstance(error, TypeError) and (found := PARSED.search(str(error))):
        return (
            f"{with_place(error)}: a body sent as application/json is parsed already and arrives as a {found[1]}. "
            "Use it as it is; call json.loads only if it is a str or a bytearray"
        )
    if isinstance(error, TypeError) and NO_BYTES.search(str(error)):
        return f"{with_place(error)}: the type of a body follows from the content type of the request. {TYPES}"
    if not isinstance(error, (KeyError, TypeError, AttributeError)) or (found_at := operand(error)) is None:
        return ""
    node, names = found_at
    try:
        value = look_up(node, names)
    except LookupError:
        return ""
    text = ast.unparse(node)
    if is_batch(value) and not isinstance(error, KeyError):
        return (
            f"{with_place(error)}: {text} is a list with one dict for each request, {len(value)} now. Take them one "
            f"by one: [answer(row) for row in {text}]"
        )
    if isinstance(error, KeyError):
        if not isinstance(value, Mapping):
            return ""
        key = error.args[0] if error.args else ""
        return f"{with_place(error)}: {describe_keys(text, value, key, of_request=not is_setting(error, value))}"
    if isinstance(error, TypeError) and "indices must be" in str(error):
        if is_setting(error, value):
            what = f"{text} is {describe_value(value)}, not a dict, in model-config.yaml"
            return f"{with_place(error)}: {what}. Make it a mapping there, or use it as it is"
        return f"{with_place(error)}: {text} is {describe_body(value)}"
    row = row_of(node, names)
    if not isinstance(error, AttributeError) or row is None:
        return ""
    if value is None:
        return f"{with_place(error)}: {text} is None; {describe_keys(*row)}"
    return f"{with_place(error)}: {text} is {describe_value(value)}, by the content type of the request. {TYPES}"


def explain_index(error: BaseException) -> str:
    """An index beyond the rows of the batch, or beyond a list in a body."""
    if not isinstance(error, IndexError) or (found_at := operand(error)) is None:
        return ""
    try:
        value = look_up(*found_at)
    except LookupError:
        return ""
    text = ast.unparse(found_at[0])
    if is_batch(value):
        return (
            f"{with_place(error)}: {text} has one dict for each request of the batch, {len(value)} now, and batches "
            f"differ in size. Take them one by one: [answer(row) for row in {text}]"
        )
    if not isinstance(value, (list, tuple)):
        return ""
    return f"{with_place(error)}: {text} is {describe_value(value)}. Check its length; if the client must: {ANSWER}"


def lacking_key(error: BaseException) -> str:
    """What the body of a request lacks, in the words of its client; empty if the error is another one."""
    if not isinstance(error, KeyError) or (found_at := operand(error)) is None:
        return ""
    lists = [local for frame in frames_of(error) for local in frame.f_locals.values() if isinstance(local, list)]
    rows = [row for local in lists for row in local if isinstance(row, dict)]
    try:
        value = look_up(*found_at)
        is_body = isinstance(value, Form) or any(field is value for row in rows for field in row.values())
        bodies = [value] if is_body else []
    except LookupError:  # the variable of a comprehension is gone, from Python 3.12 on
        bodies = fields_named(found_at[0], rows)
    if not any(isinstance(body, dict) and error.args[0] not in body for body in bodies):
        return ""
    return f"the body of the request has no {shorten(repr(error.args[0]))}"


def fields_named(node: ast.expr, rows: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """The fields of the rows that an expression such as `row["body"]` may stand for."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return []
    return [row[node.slice.value] for row in rows if node.slice.value in row]


def is_batch(value: Any) -> bool:
    """Whether a value is what `handle` gets: a list of rows."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, Form) or is_row(row) for row in value)


def is_row(value: Any) -> bool:
    return type(value) is dict and "body" in value


def is_setting(error: BaseException, value: Any) -> bool:
    """Whether a value is one of the context's dicts or inside of one; at load there is nothing else."""
    context = find_context(error)
    if context is None:
        return False
    return not context.requests or any(holds(getattr(context, name), value) for name in CONTEXT_DICTS)


def holds(document: Any, value: Any, depth: int = 4) -> bool:
    if document is value:
        return True
    return depth > 0 and isinstance(document, Mapping) and any(holds(v, value, depth - 1) for v in document.values())


def describe_keys(text: str, value: Mapping[Any, Any], key: Any = "", *, of_request: bool = True) -> str:
    """The keys of a row or of a body, and what the author may do about one that is missing."""
    near = difflib.get_close_matches(str(key), [k for k in value if isinstance(k, str)], 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    has = f"{text} has {list_keys(value)}. {hint}"
    if isinstance(body := value.get("body"), dict) and not isinstance(value, Form) and key not in ("", "data", "body"):
        remedy = f". Write {text}['body'][{key!r}]" if key in body else f": {text}['body'] has {list_keys(body)}"
        return f"{has}The fields of a JSON body are in it{remedy}"
    if isinstance(value, Form) or [*value] == ["body"]:
        return has + (
            "A plain body is under 'body', each field of a form under its name: "
            'take both with row.get("data") or row.get("body")'
        )
    if not of_request:
        where = "Write it into model-config.yaml" if "yaml_config" in text else "Add it"
        return f"{has}{where}, or give a default: .get({key!r}, …)"
    return f"{has}If the client must send it: {ANSWER}"


def list_keys(value: Mapping[Any, Any]) -> str:
    keys = ", ".join(repr(key) for key in [*value][:MAX_KEYS])
    return f"the keys {keys}{', …' if len(value) > MAX_KEYS else ''}" if keys else "no keys"


def describe_body(value: Any) -> str:
    if isinstance(value, (bytearray, bytes, str)):
        return (
            f"{describe_value(value)}, not a dict: only a body sent as application/json is parsed. Send this content "
            "type, or parse it: json.loads(…)"
        )
    return (
        f'{describe_value(value)}, not a dict. Check its type, and tell the client: raise PredictionException("…", 400)'
    )


def operand(error: BaseException) -> tuple[ast.expr, Mapping[str, Any]] | None:
    """The expression whose item or attribute is missing, as `row` in `row["data"]`, and the names in its frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not is_own(trace.tb_frame.f_code.co_filename):
        return None
    summary = traceback.extract_tb(trace)[-1]
    if summary.colno is None or summary.lineno is None or summary.lineno != summary.end_lineno:
        return None
    line = linecache.getline(summary.filename, summary.lineno).encode()
    try:
        node = ast.parse(line[summary.colno : summary.end_colno].decode(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    node = node.func if isinstance(node, ast.Call) else node
    return (node.value, trace.tb_frame.f_locals) if isinstance(node, (ast.Subscript, ast.Attribute)) else None


def look_up(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, or of items of plain dicts and lists; runs none of the author's code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Attribute):
        owner = look_up(node.value, names)
        if isinstance(owner, Context) and node.attr in CONTEXT_DICTS:
            return getattr(owner, node.attr)
        if is_handler(owner) and node.attr in vars(owner):
            return vars(owner)[node.attr]
    elif isinstance(node, ast.Subscript):
        owner, key = look_up(node.value, names), look_up(node.slice, names)
        if type(owner) in (dict, list, tuple, Form) and isinstance(key, (str, int)):
            return owner[key]
    elif isinstance(node, ast.Call) and is_get(node):
        owner, key = look_up(node.func.value, names), look_up(node.args[0], names)  # type: ignore[attr-defined]
        if type(owner) in (dict, Form) and isinstance(key, (str, int)):
            return owner.get(key)
    raise LookupError


def is_get(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "get" and len(node.args) == 1


def row_of(node: ast.expr, names: Mapping[str, Any]) -> tuple[str, dict[Any, Any]] | None:
    """The row that an expression such as `row["body"]` or `row.get("data")` takes a value from."""
    if isinstance(node, ast.Call) and is_get(node):
        node = node.func
    if not isinstance(node, (ast.Subscript, ast.Attribute)):
        return None
    row = look_up(node.value, names)
    return (ast.unparse(node.value), row) if isinstance(row, Form) or (type(row) is dict and "body" in row) else None
