"""Mistakes of any Python code: names, environment variables, weights, arguments; and a sentence for every other one."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import sys
from typing import Any

from flambeau.errors import suggest
from flambeau.worker.code_places import frames_of, is_own, lines_of, shorten, source_line, with_place

ANSWER = 'raise PredictionException("…", 400)'
MAX_CHARACTERS = 600  # of a list of weights
ENDLESS = "a function calls itself without an end. Give it a case that returns"
LOOP = "`async def handle` runs in an event loop. Await the call"
NUMBERS = "a tensor is made of numbers, or of lists of them. Take them out of the body first"
NO_TEXT = f"these bytes are not text. Use them as they are, as for an image; or, for the client: {ANSWER}"
UNEVEN = "the lists have different lengths. Pad them, or answer one after the other"
SIZES = "the requests of a batch differ in size. Pad the tensors, or set batchSize: 1"
BYTES = "a body is bytes, and no file. Make it one: io.BytesIO(body), as in Image.open(io.BytesIO(body))"
PICKLED = (
    "the file was pickled by a script that defined this class itself. Move the class into a module beside the handler, "
    "import it from there in the script, and write the file again; of a network save the state_dict() only"
)
LARGE = "memory is short. Lower batchSize, the size of what is computed at once, or the number of workers"
REMEDIES = (  # the name of the exception, a part of its text, and what to do
    ("AttributeError", "'bytearray' object has no attribute 'read'", BYTES),
    ("AttributeError", "'bytearray' object has no attribute 'seek'", BYTES),
    ("AttributeError", "Can't get attribute", PICKLED),
    ("MemoryError", "", LARGE),
    ("_ArrayMemoryError", "", LARGE),
    ("OutOfMemoryError", "", LARGE),
    ("RuntimeError", "DefaultCPUAllocator", LARGE),
    ("ExceptionWithoutText", "", "let its __str__ return a text"),
    ("EOFError", "reading a line", "a worker has no terminal. Take the value from context.model_yaml_config"),
    ("TypeError", "must derive from BaseException", f'write raise ValueError("…"), or, for the client, {ANSWER}'),
    ("TypeError", "invalid data type 'str'", NUMBERS),
    ("RuntimeError", "asyncio.run() cannot be called", LOOP),
    ("RuntimeError", "event loop is already running", LOOP),
    ("RuntimeError", "Could not infer dtype of", NUMBERS),
    ("RuntimeError", "Tensor that requires grad", "or compute it under `with torch.inference_mode():`"),
    ("RuntimeError", "stack expects each tensor to be equal size", SIZES),
    ("ValueError", "expected sequence of length", UNEVEN),
    ("UnicodeDecodeError", "", NO_TEXT),
    ("UnboundLocalError", "", "a path of the code does not set it. Set it before the first `if` or loop"),
    ("RecursionError", "", ENDLESS),
    ("StopIteration", "", "next(…) found nothing. Give it a default: next(…, None)"),
    ("UnidentifiedImageError", "", f"the body is no image that Pillow can read. To tell the client: {ANSWER}"),
    ("HTTPException", "", f"the server does not know this exception. To choose the answer: {ANSWER}"),
)
IMPORTS = {  # names that handlers use most, and where they are
    "BaseHandler": "from ts.torch_handler.base_handler import BaseHandler",
    "PredictionException": "from ts.utils.util import PredictionException",
    "F": "import torch.nn.functional as F",
    "Image": "from PIL import Image",
    "Path": "from pathlib import Path",
    "nn": "from torch import nn",
    "np": "import numpy as np",
    "torch": "import torch",
    "transforms": "from torchvision import transforms",
}
WRONG_CALL = re.compile(r"(\w+)\.(\w+)\(\) (?:got an unexpected|got multiple|missing|takes)")


def explain_remedy(error: BaseException) -> str:
    """An exception that says itself what it found; only what to do is to add."""
    for name, text, remedy in REMEDIES:
        if type(error).__name__ == name and text in str(error):
            return f"{with_place(error)}: {remedy}"
    return ""


def explain_undefined(error: BaseException) -> str:
    """A name that was not imported, or is misspelt."""
    if type(error) is not NameError or not error.name:
        return ""
    line = IMPORTS.get(error.name) or (f"import {error.name}" if error.name in sys.stdlib_module_names else "")
    if line:
        return f"{with_place(error)}: it is not imported. Write `{line}` at the top of the file"
    own = [frame for frame in frames_of(error) if is_own(frame.f_code.co_filename)]
    near = suggest(error.name, [name for f in own for name in (*f.f_locals, *f.f_globals)] + dir(builtins))
    return f"{with_place(error)}: {f'did you mean {near}?' if near else 'define it before this line, or import it'}"


def explain_environment(error: BaseException) -> str:
    """A variable that the environment of the worker, which is that of the server, does not have."""
    if not isinstance(error, KeyError) or not any(f.f_locals.get("self") is os.environ for f in frames_of(error)):
        return ""
    name = error.args[0]
    return (
        f"{with_place(error)}: the server was started without this environment variable. Set it before the start: "
        f"export {name}=…; or give a default: os.environ.get({name!r}, …)"
    )


def explain_weights(error: BaseException) -> str:
    """A state dict of another network."""
    text = " ".join(str(error).split())
    if not isinstance(error, RuntimeError) or "loading state_dict" not in text:
        return ""
    place = source_line(error)
    remedy = "The weights belong to another network than the code builds: build the one that they were saved from"
    if re.search(r'Unexpected key\(s\) in state_dict: "module\.', text):
        remedy = (
            'The names begin with "module.", because the model was saved from DataParallel: load '
            '{key.removeprefix("module."): value for key, value in weights.items()}'
        )
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
    return f"RuntimeError: {text.rstrip('.')}{f' ({place})' if place else ''}. {remedy}"


def explain_arguments(error: BaseException) -> str:
    """A method of a model, or of another object, that is called with arguments that it does not take."""
    found = WRONG_CALL.match(str(error)) if isinstance(error, TypeError) and source_line(error) else None
    if found is None:
        return ""
    for frame in frames_of(error):
        for value in [*frame.f_locals.values()]:
            if type(value).__name__ == found[1] and (signature := signature_of(value, found[2])):
                return f"{with_place(error)}: it takes {signature}. Call it with these arguments"
    return ""


def signature_of(owner: Any, method: str) -> str:
    """`(input)`: the arguments of a method, without their types; empty if it tells none."""
    try:
        signature = inspect.signature(getattr(owner, method))
    except (AttributeError, TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return shorten(str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)))


def locate(error: BaseException) -> str:
    """Any other exception of the author's code: the line that raised it, and how to answer the client."""
    own = [line.strip() for frame, line in lines_of(error) if is_own(frame.f_code.co_filename)]
    if not own:
        return ""
    line = f", in `{shorten(own[-1])}`" if own[-1] else ""
    return f"{with_place(error)}{line}. If the request is at fault, tell the client: {ANSWER}"
