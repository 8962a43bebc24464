"""Reads a request into the input arrays of a session, and checks them against the model's declaration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.onnx.npy import Array, is_npy, is_npz, read_npy, read_npz
from flambeau.handlers.request_rows import parse_json_bytes

REMEDY = "send JSON, or NumPy's .npy or .npz bytes"
NUMBERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16"}
DTYPES |= {"tensor(bool)": "bool", "tensor(string)": "object"} | {f"tensor({name})": name for name in NUMBERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input as the model declares it; a dimension that is not an integer has any size."""

    name: str
    kind: str  # in onnxruntime's words: tensor(float)
    dtype: np.dtype[Any]
    dims: tuple[int | str | None, ...]

    @property
    def may_lack_batch_axis(self) -> bool:
        """Whether a request may leave the first axis out."""
        return bool(self.dims) and (self.dims[0] == 1 or not isinstance(self.dims[0], int))

    @property
    def shape(self) -> str:
        return "[" + ", ".join(str(dim or "?") for dim in self.dims) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrays:
    """The arrays of one request, each with a batch axis; `is_single` if the client left it out."""

    arrays: Mapping[str, Array]
    is_single: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """Limits for inputs, from the handler's options."""

    allow_nan: bool = False
    max_unpacked_bytes: int = 1 << 28


def read_specs(inputs: Sequence[Any]) -> list[InputSpec]:
    """The inputs of a session; one of a type that requests cannot hold is an error."""
    for declared in inputs:
        if declared.type not in DTYPES:
            raise HandlerError(f"input {declared.name} is {declared.type}; supported are {', '.join(DTYPES)}")
    return [
        InputSpec(name=i.name, kind=i.type, dtype=np.dtype(DTYPES[i.type]), dims=tuple(i.shape or ())) for i in inputs
    ]


def read_request_arrays(value: Any, specs: Sequence[InputSpec], limits: InputLimits) -> RequestArrays:
    """The arrays of one request; BadRequest names the input, the expected and the given type or shape."""
    given = name_values(parse(value, limits), [spec.name for spec in specs])
    arrays = {spec.name: read_array(given[spec.name], spec, limits) for spec in specs}
    single = {s.name: arrays[s.name].ndim == len(s.dims) - 1 for s in specs if s.may_lack_batch_axis}
    if len(set(single.values())) > 1:
        one, many = (next(name for name, flag in single.items() if flag is wanted) for wanted in (True, False))
        raise BadRequest(f"input {one} is one example and input {many} a batch; send both with or without the axis")
    is_single = any(single.values())
    for spec in specs:
        lacks_axis = is_single and spec.name in single
        check_shape(arrays[spec.name], spec, lacks_axis=lacks_axis)
        if lacks_axis:
            arrays[spec.name] = arrays[spec.name][np.newaxis]
    return RequestArrays(arrays=arrays, is_single=is_single)


def parse(value: Any, limits: InputLimits) -> Any:
    """Parse bytes by their first bytes; other values are already parsed."""
    if not isinstance(value, (bytes, bytearray)):
        return value
    if is_npy(value):
        return read_npy(value)
    if is_npz(value):
        return read_npz(value, limits.max_unpacked_bytes)
    return parse_json_bytes(value, REMEDY)


def name_values(value: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """The value of each input by name."""
    if isinstance(value, Mapping) and "inputs" in value and "inputs" not in names:
        if len(value) > 1:
            raise BadRequest('a request with "inputs" must have no other fields')
        value = value["inputs"]
    if not isinstance(value, Mapping):
        if len(names) != 1:
            raise BadRequest(f"the model has {len(names)} inputs; send an object with {', '.join(names)}")
        return {names[0]: value}
    unknown, missing = value.keys() - set(names), set(names) - value.keys()
    if unknown or missing:
        found = [f"{', '.join(sorted(map(str, unknown)))} unknown"] if unknown else []
        found += [f"{', '.join(sorted(missing))} missing"] if missing else []
        raise BadRequest(f"inputs {' and '.join(found)}; the model takes {', '.join(names)}")
    return value


def read_array(value: Any, spec: InputSpec, limits: InputLimits) -> Array:
    """One input in the model's dtype. Conversions may lose precision, but not change a value otherwise."""
    value = parse(value, limits)  # a form has bytes in each field
    is_text = holds_text(value)
    if is_text and spec.dtype.kind in "fiub":
        raise BadRequest(f"input {spec.name} takes {spec.kind}; given: text")
    try:
        # As objects: a NumPy text array allocates the longest text for each element.
        array = np.asarray(value, dtype=object) if is_text else np.asarray(value)
    except (ValueError, OverflowError) as error:  # lists of uneven lengths
        raise BadRequest(f"input {spec.name} is not a rectangular tensor: {error}") from None
    if array.size == 0:
        raise BadRequest(f"input {spec.name} is empty; it takes {spec.kind} of shape {spec.shape}")
    if not can_become(array, spec.dtype):
        kind = type(value).__name__ if array.dtype == object else array.dtype
        raise BadRequest(f"input {spec.name} takes {spec.kind}; given: {kind}")
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is rejected below
        array = array.astype(spec.dtype, copy=False)
    if spec.dtype.kind == "f" and not limits.allow_nan and not np.isfinite(array).all():
        raise BadRequest(
            f"input {spec.name} has NaN, infinity or numbers beyond {spec.kind}; "
            "send finite numbers, or set allow_nan in the handler section of model-config.yaml"
        )
    return array


def holds_text(value: Any) -> bool:
    """Whether nested lists hold any text."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            return True
        if isinstance(item, list):
            waiting.extend(item)
    return False


def can_become(array: Array, dtype: np.dtype[Any]) -> bool:
    """Whether an array can be cast: integers may become floats, otherwise the kind must be equal."""
    kind = array.dtype.kind
    if dtype.kind == "f":
        return kind in "iuf"
    if dtype.kind in "iu":
        if kind not in "iu":
            return False
        bounds = np.iinfo(dtype)
        return bool(int(array.min()) >= bounds.min and int(array.max()) <= bounds.max)
    if dtype.kind == "b":
        return kind == "b"
    return kind == "U" or (kind == "O" and all(isinstance(text, str) for text in array.flat))


def check_shape(array: Array, spec: InputSpec, *, lacks_axis: bool) -> None:
    """Reject a shape that the model does not accept."""
    if not spec.dims:  # a scalar, or a model that does not declare it
        return
    dims = spec.dims[1:] if lacks_axis else spec.dims
    fits = len(dims) == array.ndim and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(dims, array.shape, strict=True)
    )
    if not fits:
        hint = ", or one example without the first axis" if spec.may_lack_batch_axis else ""
        raise BadRequest(f"input {spec.name} takes shape {spec.shape}{hint}; given: {list(array.shape)}")
