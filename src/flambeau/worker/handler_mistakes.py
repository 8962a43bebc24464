"""Mistakes of handler authors: an exception → one sentence with what was found, the place and the remedy.

The server and `flambeau check` use the same sentences. Nothing here runs for a request that succeeds.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

from flambeau.worker.code_mistakes import (
    explain_arguments,
    explain_environment,
    explain_remedy,
    explain_undefined,
    explain_weights,
)
from flambeau.worker.code_places import (
    STAGES,
    definition,
    describe_value,
    first_line,
    frames_of,
    is_handler,
    is_own,
    lines_of,
    source_line,
    with_place,
)
from flambeau.worker.context import Context
from flambeau.worker.load_mistakes import (
    explain_abstract,
    explain_file,
    explain_first_call,
    explain_import,
    explain_own_module,
    explain_pretrained,
    explain_signature,
    explain_syntax,
)
from flambeau.worker.request_mistakes import explain_index, explain_item

logger = logging.getLogger(__name__)

SET_BY_BASE = ("model", "device", "map_location", "manifest", "mapping", "context", "model_pt_path")
NO_GPU = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|CUDA is not available|on a CUDA device but"
    r"|no CUDA-capable device|CUDA unknown error|invalid device ordinal|Invalid device string: 'cuda:None'"
)


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
