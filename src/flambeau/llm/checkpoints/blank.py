"""Blank networks: parameters with names, shapes and types but no memory, to be filled from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutBeginnings(TorchFunctionMode):
    """Parameters get no random values: without memory they cannot, and trying takes seconds of imports."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leave the tensor of an initializer as it is, and let everything else happen."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def blank(dtype: torch.dtype) -> Iterator[None]:
    """Networks made here have no memory, and parameters of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), WithoutBeginnings():
            yield
    finally:
        torch.set_default_dtype(before)
