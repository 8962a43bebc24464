"""Networks without memory: their parameters have names, shapes and types only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SkipInitialization(TorchFunctionMode):
    """Skips random initialization: it has no effect on the meta device, and its imports take seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def on_meta_device(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Networks built in this context have parameters of this type and take no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), SkipInitialization():
            yield
    finally:
        torch.set_default_dtype(before)
