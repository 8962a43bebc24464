"""DenseNetHandler: saved tensors in, tensors out; the base class of some older handlers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.request_rows import value_of

if TYPE_CHECKING:
    from flambeau.worker.context import Context


class DenseNetHandler:
    """Stacks the tensors of a batch and returns the model's output for each."""

    def __init__(self) -> None:
        self.model: Any = None
        self.device: torch.device | None = None
        self.initialized = False
        self.context: Context | None = None
        self.manifest: Any = None
        self.map_location: str | None = None

    def initialize(self, context: Context) -> None:
        loader = BaseHandler()
        loader.initialize(context)
        self.model, self.device, self.map_location = loader.model, loader.device, loader.map_location
        self.manifest = context.manifest
        self.initialized = True

    def inference(self, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def handle(self, data: Sequence[Any], context: Context) -> list[torch.Tensor]:
        """Tensors saved with torch.save → one output per request, which the server saves the same way."""
        self.context = context
        output = self.inference(torch.stack([read_tensor(value_of(row)) for row in data]))
        # Clones, since torch.save writes the whole storage of a view.
        return [output[i : i + 1].clone() for i in range(len(data))]


def read_tensor(value: Any) -> torch.Tensor:
    """Load the tensor in a body, without executing code."""
    try:
        tensor = torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
    except Exception as error:  # invalid bytes may raise anything
        raise BadRequest(f"the body is not a tensor saved with torch.save: {error}") from None
    if not isinstance(tensor, torch.Tensor):
        raise BadRequest(f"the body holds {type(tensor).__name__}, not a tensor")
    return tensor
