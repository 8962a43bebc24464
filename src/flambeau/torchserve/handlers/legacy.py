"""Handler classes of older archives: ModelService, and TorchServe's wrappers of other engines, unsupported here."""

from __future__ import annotations

import ast
import io
import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.request_rows import value_of
from flambeau.worker.context import Context


class ModelService:
    """A handler that reads the first input its signature file names."""

    def __init__(self, model_name: str, model_dir: str, manifest: Any, gpu: int | None = None) -> None:
        self.ctx: Any = None
        self._context: Context | None = None
        self._signature: Any = None

    def initialize(self, context: Context) -> None:
        self._context = context
        folder = Path(context.system_properties["model_dir"])
        file = folder / (context.manifest or {})["Model"]["Signature"]
        if not file.is_file():
            raise ValueError("Signature file is not found.")
        self._signature = json.loads(file.read_text())

    @abstractmethod
    def inference(self, data: list[Any]) -> Any:
        """Answer the inputs of one request."""

    @abstractmethod
    def ping(self) -> Any:
        """Answer a health check."""

    def signature(self) -> Any:
        return self._signature

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer the first request: its input named by the signature, else `body` or `data`."""
        row = data[0]
        names = (self._signature["inputs"][0]["data_name"], "body", "data")
        value = next((row[name] for name in names if row.get(name) is not None), None)
        if self._signature["input_type"] == "application/json" and isinstance(value, (bytes, bytearray)):
            value = ast.literal_eval(value.decode())
        result = self.inference([value])
        return result if isinstance(result, list) else [result]


class SingleNodeService(ModelService):
    """A service of one model: preprocess, infer, postprocess."""

    def inference(self, data: list[Any]) -> Any:
        return self._postprocess(self._inference(self._preprocess(data)))

    @abstractmethod
    def _inference(self, data: Any) -> Any:
        return data

    def _preprocess(self, data: Any) -> Any:
        return data

    def _postprocess(self, data: Any) -> Any:
        return data


class ReplacedHandler:
    """A handler that this server does not support; creating one raises the remedy."""

    remedy = ""

    def __init__(self) -> None:
        raise HandlerError(f"{type(self).__name__} is not a handler of this server: {self.remedy}")


class VLLMHandler(ReplacedHandler):
    """TorchServe's wrapper of vLLM."""

    remedy = "use gpt_handler, this server's own engine, or pack a handler of your own that imports vllm"


class TRTLLMHandler(ReplacedHandler):
    """TorchServe's wrapper of TensorRT-LLM."""

    remedy = "use gpt_handler, this server's own engine, or pack a handler of your own that imports tensorrt_llm"


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
