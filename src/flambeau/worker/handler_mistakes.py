"""Mistakes of handler authors: a result or an exception → one sentence with what was found, the place and the remedy.

The server and `flambeau check` use the same sentences. Nothing here runs for a request that succeeds.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from typing import Any

from flambeau.worker.code_mistakes import (
    ANSWER,
    explain_arguments,
    explain_environment,
    explain_remedy,
    explain_undefined,
    explain_weights,
)
from flambeau.worker.code_places import (
    STAGES,
    definition,
    first_line,
    frames_of,
    is_handler,
    is_own,
    lines_of,
    shorten,
    source_line,
    with_place,
)
from flambeau.worker.context import Context
from flambeau.worker.inputs import Form
from flambeau.worker.load_mistakes import (
    explain_abstract,
    explain_file,
    explain_first_call,
    explain_import,
    explain_own_module,
    explain_pretrained,
    explain_signature,
    explain_syntax,
    find_context,
)

logger = logging.getLogger(__name__)

MAX_KEYS = 12
SET_BY_BASE = ("model", "device", "map_location", "manifest", "mapping", "context", "model_pt_path")
CONTEXT_DICTS = ("model_yaml_config", "system_properties", "manifest")
NO_GPU = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|CUDA is not available|on a CUDA device but"
    r"|no CUDA-capable device|CUDA unknown error|invalid device ordinal|Invalid device string: 'cuda:None'"
)
PARSED = re.compile(r"the JSON object must be str, bytes or bytearray, not (\w+)")
NO_BYTES = re.compile(r"a bytes-like object is required, not '(dict|list|str|int|float|NoneType)'")
TYPES = "JSON arrives parsed, text as str, everything else as bytearray; check the type with isinstance"
NO_CHUNK = "yielded None, expected text, bytes or JSON. Yield only what is to be sent; `return` ends a stream"


# ---- results ----


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
    import json

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


# ---- exceptions ----


def explain_exception(error: BaseException) -> str:
    """What an exception means, where it was raised and the remedy; empty if nothing is to add to its traceback."""
    for find in EXPLANATIONS:
        try:
            if sentence := find(error):
                return sentence
        except Exception:  # the values that it looks at are the author's, and may do anything
            logger.debug("%s failed", find.__name__, exc_info=True)
    return ""


def lacks_gpu(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, AssertionError)) and NO_GPU.search(str(error)) is not None


def explain_gpu(error: BaseException) -> str:
    if not lacks_gpu(error):
        return ""
    if "deserialize" in str(error):
        remedy = "Give torch.load the argument map_location=self.device"
    else:
        remedy = "Use self.device, which BaseHandler.initialize sets, instead of 'cuda'"
    return (
        f"{with_place(error)}: the code asks for a GPU, and this worker has none. {remedy}; or choose the "
        'device yourself: gpu_id = context.system_properties["gpu_id"] is None on a CPU'
    )


def explain_stage(error: BaseException) -> str:
    """A stage that returns nothing: the next one got None."""
    if "NoneType" not in str(error):
        return ""
    for frame in frames_of(error):
        name, names = frame.f_code.co_name, frame.f_code.co_varnames
        handler = frame.f_locals.get("self")
        if name not in STAGES[1:] or len(names) < 2 or not is_handler(handler):
            continue
        if names[1] in frame.f_locals and frame.f_locals[names[1]] is None:
            before = STAGES[STAGES.index(name) - 1]
            where = definition(getattr(handler, before, None))
            return (
                f"{before}{f' ({where})' if where else ''} returned None, so that {name} failed: {first_line(error)}. "
                f"Is a return statement missing in {before}? It must return what {name} takes"
            )
    return ""


def explain_stage_input(error: BaseException) -> str:
    """The author's preprocess returned what BaseHandler's inference, or the model in it, cannot use."""
    for frame in frames_of(error):
        handler = frame.f_locals.get("self")
        if frame.f_code.co_name != "inference" or is_own(frame.f_code.co_filename) or not is_handler(handler):
            continue
        if (where := definition(getattr(handler, "preprocess", None))) and "data" in frame.f_locals:
            remedy = "Return a tensor of the shape and type that the model takes"
            if inspect.iscoroutine(frame.f_locals["data"]):
                frame.f_locals["data"].close()
                remedy = "BaseHandler does not await its stages: write `def preprocess` without async"
            return (
                f"preprocess ({where}) returned {describe_value(frame.f_locals['data'])}, so that inference failed: "
                f"{first_line(error)}. {remedy}"
            )
    return ""


def explain_attribute(error: BaseException) -> str:
    """An attribute of the handler that `initialize` or `__init__` did not set."""
    if isinstance(error, AttributeError) and is_handler(error.obj):
        return f"{with_place(error)}: {why_unset(error.obj, error.name)}"
    if "NoneType" not in str(error) or not isinstance(error, (AttributeError, TypeError)):
        return ""
    for frame, line in reversed([*lines_of(error)]):
        handler = frame.f_locals.get("self")
        if not is_handler(handler):
            continue
        for name in re.findall(r"\bself\.(\w+)", line):
            if vars(handler).get(name, handler) is None:
                return f"{with_place(error)}: self.{name} is None; {why_unset(handler, name)}"
    return ""


def why_unset(handler: Any, name: str | None) -> str:
    kind = type(handler)
    if name in SET_BY_BASE and any(base.__name__ == "BaseHandler" for base in kind.__mro__):
        for method in ("initialize",) if name in vars(handler) else ("__init__", "initialize"):
            function = getattr(kind, method)
            arguments = "" if method == "__init__" else "context"
            if (place := definition(function)) and method not in inspect.unwrap(function).__code__.co_names:
                return (
                    f"{kind.__name__}.{method} ({place}) does not call super().{method}({arguments}), which sets it. "
                    f"Call it, or set self.{name} there"
                )
    if name == "mapping" and getattr(handler, "initialized", False):
        return (
            "the model has no index_to_name.json, which sets it. Put the file into the model's folder "
            "(torch-model-archiver: --extra-files index_to_name.json), or test `if self.mapping`"
        )
    place = definition(getattr(kind, "initialize", None))
    return f"initialize{f' ({place})' if place else ''} did not set it. Write self.{name} = … there"


def explain_context(error: BaseException) -> str:
    """A name that the context does not have, or an index beyond the batch."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Context):
        names = [name for name in dir(error.obj) if not name.startswith("_")]
        near = difflib.get_close_matches(error.name or "", names, 3, cutoff=0.5)
        found = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
        return f"{with_place(error)}: {found} The loaded model is the handler's own: self.model"
    last = [*frames_of(error)][-1:]
    if isinstance(error, IndexError) and last and isinstance(context := last[0].f_locals.get("self"), Context):
        count = len(context.requests)
        return f"{with_place(error)}: idx counts the requests of this batch from 0; it has {count}. Use a smaller one"
    return ""


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


def describe_value(value: Any) -> str:
    from flambeau.worker.stage_timings import describe  # loaded for mistakes only

    return describe(value)


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


EXPLANATIONS = (  # the first that knows the mistake
    explain_gpu,
    explain_syntax,
    explain_import,
    explain_own_module,
    explain_pretrained,
    explain_signature,
    explain_abstract,
    explain_first_call,
    explain_file,
    explain_environment,
    explain_undefined,
    explain_weights,
    explain_stage,
    explain_attribute,
    explain_context,
    explain_item,
    explain_index,
    explain_remedy,
    explain_arguments,
    explain_stage_input,
)


def explain_exit(error: SystemExit) -> str:
    place = source_line(error)
    return f"the handler called sys.exit({'' if error.code is None else error.code!r}){f' ({place})' if place else ''}"


def explain_interrupt(error: KeyboardInterrupt) -> str:
    """For a terminal, where Ctrl-C and a handler raise the same."""
    return f"{with_place(error)}. Without Ctrl-C, the handler raised it, and ends the worker with it: raise another one"


# ---- what succeeds, and is wrong ----


def explain_thread(error: BaseException) -> str:
    """An exception that ended a thread of the author's; empty for one of a library."""
    if not source_line(error):
        return ""
    return (
        f"a thread of the handler ended with {with_place(error)}, and requests are answered without it. Let handle "
        "raise it: start the work with concurrent.futures, and take future.result()"
    )


def explain_training(handler: Any, handle: Callable[..., Any]) -> str:
    """The model of a handler that drops values at random or changes with each batch; empty if there is none."""
    torch = sys.modules.get("torch")
    if not isinstance(kind := getattr(getattr(torch, "nn", None), "Module", None), type):  # not loaded, or another one
        return ""
    names = vars(handler) if hasattr(handler, "__dict__") else getattr(inspect.unwrap(handle), "__globals__", {})
    prefix = "self." if hasattr(handler, "__dict__") else ""
    for name, value in [*names.items()]:
        if isinstance(value, kind) and (layer := find_training_layer(value)):
            place = definition(getattr(type(handler), "initialize", None)) or definition(handle)
            where = f" ({place})" if place else ""
            return (
                f"{prefix}{name} is in training mode after initialize{where}: its {layer} makes answers random, or "
                f"dependent on the other requests of a batch. Call {prefix}{name}.eval() in initialize"
            )
    return ""


def find_training_layer(module: Any) -> str:
    """`Dropout layer 'encoder.1'`: the first layer that behaves differently in training; empty if there is none."""
    for path, layer in module.named_modules():
        name = str(getattr(layer, "original_name", type(layer).__name__))
        has_effect = getattr(layer, "p", 1) != 0
        if getattr(layer, "training", False) and has_effect and re.match(r"\w*Dropout|\w*BatchNorm", name):
            return f"{name} layer {path!r}" if path else f"{name} layer"
    return ""


def explain_split(error: BaseException, count: int, sentence: str, *, has_succeeded: bool) -> str:
    """Why a batch that failed, and whose requests ran again one by one, is worth a warning."""
    result = "each of them succeeded alone" if has_succeeded else "they were run again one by one"
    return (
        f"a batch of {count} requests failed, and {result}: {sentence or with_place(error)}. "
        "Until the handler can answer a batch, set batchSize: 1; it is faster than to run batches twice"
    )
