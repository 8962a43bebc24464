"""Request rows ↔ tensors, and which exceptions the client's input caused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.request_rows import value_of

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
_IMAGE_ERRORS = ("UnidentifiedImageError", "DecompressionBombError")


def to_tensor(data: Any, device: torch.device | None) -> torch.Tensor:
    """A batch of rows as one tensor; tensors and plain lists of numbers are also accepted."""
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        examples = [to_example(value_of(row)) for row in data]
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
        except (ValueError, RecursionError):
            raise BadRequest("the body is neither JSON nor a .npy file; send numbers, like [1.0, 2.0]") from None
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


def client_error_reason(error: Exception) -> str | None:
    """The reason for a 400 if the input caused an exception; else None."""
    name = type(error).__name__
    if name in _IMAGE_ERRORS:
        return f"the body is not an image that can be read: {str(error).partition(' <_io')[0]}"
    if isinstance(error, torch.OutOfMemoryError):
        return None
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
