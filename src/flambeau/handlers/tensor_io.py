"""Request rows ↔ tensors, and which exceptions the client's input caused."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.request_rows import content_of

NPY_MAGIC = b"\x93NUMPY"
# Messages of torch, exported programs and compiled packages about inputs of a wrong shape or dtype.
_SHAPE_ERRORS = re.compile(
    r"shapes cannot be multiplied|must have the same dtype|size mismatch|must match the (existing )?size"
    r"|[Ee]xpected (?!all tensors).{0,80}(channels|scalar type|[Tt]ensor for argument|D input|\d-D|dim|shape|size|got)"
    r"|Given (groups|normalized_shape)"
    r"|Guard failed|unmatched (dim|dtype)|dim value is too (small|large)"
    r"|not implemented for '(Long|Int|Bool|Byte)'|[Kk]ernel size can't be greater"
    r"|should contain \d+ elements|Dimension out of range|stack expects each tensor|Calculated padded input size"
)
_ONNX_ERROR = "InvalidArgument"  # onnxruntime's exception for inputs of a wrong shape or dtype
# A Normalize of three channels that gets one, and one that gets the integers of 16-bit pixels.
_CHANNEL_ERRORS = re.compile(r"match the broadcast shape|size of tensor a \(\d\) must match|should be a float tensor")
_NOT_BYTES = re.compile(r"a bytes-like object is required, not '(dict|list|str|int|float|bool)'")
_IMAGE_ERRORS = ("UnidentifiedImageError", "DecompressionBombError")


def to_tensor(data: Any, device: torch.device | None) -> torch.Tensor:
    """A batch of rows as one tensor; tensors and plain lists of numbers are also accepted."""
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        examples = [to_example(content_of(row)) for row in data]
        try:
            return torch.stack(examples).to(device)
        except RuntimeError:
            shapes = ", ".join(str(tuple(example.shape)) for example in examples)
            raise BadRequest(f"the inputs of a batch must have the same shape, not {shapes}") from None
    return torch.as_tensor(data, device=device)


def to_example(content: Any) -> torch.Tensor:
    """A request's content as a tensor: lists of numbers, JSON text, or the bytes of a .npy file."""
    if isinstance(content, (bytes, bytearray)) and content.startswith(NPY_MAGIC):
        from flambeau.handlers.onnx.npy import read_npy

        content = read_npy(content).copy()  # a view of the body is read-only
    elif isinstance(content, (bytes, bytearray, str)):
        try:
            content = json.loads(content)
            content = content_of({"body": content}) if isinstance(content, Mapping) else content
        except (ValueError, RecursionError):
            raise BadRequest("the body is neither JSON nor a .npy file; send numbers, like [1.0, 2.0]") from None
    if isinstance(content, Mapping):
        names = ", ".join(repr(str(key)[:40]) for key in [*content][:5])
        found = names or "nothing"
        raise BadRequest(f'send numbers, like [1.0, 2.0] or {{"data": [1.0, 2.0]}}; the object has {found}')
    try:
        example = torch.as_tensor(content)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRequest(f"the input must be numbers, in lists of equal length: {error}") from None
    if example.is_floating_point() and not bool(torch.isfinite(example).all()):
        raise BadRequest("the input has a NaN or an infinite number")
    return example


def to_rows(output: Any) -> list[Any]:
    """A model's output as one plain value per row. It may be a tensor, a tuple of tensors or a dict of tensors."""
    if isinstance(output, Mapping):
        columns = {key: to_rows(value) for key, value in output.items()}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if isinstance(output, tuple):
        return [list(values) for values in zip(*map(to_rows, output), strict=True)]
    result: list[Any] = output if isinstance(output, list) else output.tolist()
    return result


def is_dtype_error(data: Any, error: Exception) -> bool:
    """Whether a model rejected int64 or float64 input only because it computes with another dtype."""
    if not isinstance(data, torch.Tensor) or data.dtype not in (torch.int64, torch.float64):
        return False
    reason = client_error_reason(error) or ""
    return re.search(r"dtype|scalar type|data type|'Long'", reason) is not None


def floating_dtype_of(model: Any) -> torch.dtype:
    """The dtype of a model's floating-point parameters."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn exceptions that the input caused into BadRequest, so that the client gets a 400 with the reason."""
    try:
        yield
    except BadRequest:
        raise
    except Exception as error:
        if reason := client_error_reason(error):
            raise BadRequest(reason) from error
        raise


def is_from_torch(error: BaseException) -> bool:
    """Whether an exception was raised inside torch, not in a handler."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("torch.")


def modules_of(error: BaseException) -> list[str]:
    """The modules of an exception's frames, outermost first."""
    modules, trace = [], error.__traceback__
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    return modules


def is_in_preprocess(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "preprocess":
            return True
        trace = trace.tb_next
    return False


def image_error_reason(error: Exception) -> str | None:
    """The reason for a 400 if an image could not be decoded, or has channels that `preprocess` does not expect."""
    modules = modules_of(error)
    if modules and (modules[-1] == "PIL.ImageFile" or modules[-1].endswith("ImagePlugin")):
        return f"the image cannot be decoded: {error}"
    if any(module.startswith("torchvision.") for module in modules) and _CHANNEL_ERRORS.search(str(error)):
        return (
            f"the image has other channels than the handler expects ({error}); send an RGB image of 8 bits, or let "
            "preprocess call image.convert('RGB')"
        )
    found = _NOT_BYTES.search(str(error))
    if found and isinstance(error, TypeError):
        kinds = {"dict": "a JSON object", "list": "a JSON list", "str": "text"}
        sent = kinds.get(found[1], "a JSON value")
        return f"the body is {sent}, and the handler reads bytes; send the file itself, for example with curl -T FILE"
    return None


def is_empty(error: BaseException) -> bool:
    """Whether the file that Pillow could not read has no bytes."""
    trace = error.__traceback__
    while trace is not None:
        if isinstance(file := trace.tb_frame.f_locals.get("fp"), io.BytesIO):
            return not file.getbuffer().nbytes
        trace = trace.tb_next
    return False


def client_error_reason(error: Exception) -> str | None:
    """The reason for a 400 if the input caused an exception; else None."""
    name = type(error).__name__
    if name in _IMAGE_ERRORS:
        if is_empty(error):
            return "the body is empty; send an image, for example with curl -T FILE"
        return f"the body is not an image that can be read: {str(error).partition(' <_io')[0]}"
    if isinstance(error, torch.OutOfMemoryError):
        return None
    if is_in_preprocess(error) and (reason := image_error_reason(error)):
        return reason
    message = ""
    if name == _ONNX_ERROR:
        message = str(error)
    elif isinstance(error, (RuntimeError, AssertionError)) or (isinstance(error, ValueError) and is_from_torch(error)):
        message = next((line for line in str(error).splitlines() if _SHAPE_ERRORS.search(line)), "")
    if not message:
        return None
    is_integer = "Long" in message or "int64" in message
    hint = "; numbers written as 1 are integers, write 1.0" if is_integer else ""
    return f"the model does not accept inputs of this shape or type: {message.removeprefix('RuntimeError: ')}{hint}"
