"""Handler classes of older archives: ModelService, and TorchServe's wrappers of other engines, unsupported here."""

from __future__ import annotations

import ast
import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError
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
