"""BaseHandler: initialize → preprocess → inference → postprocess behind handle(data, context)."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.handlers.device import choose_device
from flambeau.handlers.labels import load_label_mapping
from flambeau.handlers.weights import load_eager, load_torchscript

if TYPE_CHECKING:
    from flambeau.worker.context import Context


class BaseHandler(abc.ABC):  # noqa: B024  (instances of it serve models that need no code)
    """Loads a model and runs it; override the stages that differ, keep the rest."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: torch.device | None = None
        self.initialized = False
        self.context: Context | None = None
        self.model_pt_path: str | None = None
        self.manifest: Mapping[str, Any] | None = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.model_yaml_config: Mapping[str, Any] = {}

    def initialize(self, context: Context) -> None:
        """Choose the device, load the model, read the labels."""
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        self.device, self.map_location = choose_device(properties["gpu_id"])
        entry: Mapping[str, Any] = (self.manifest or {}).get("model", {})
        serialized, model_file = entry.get("serializedFile"), entry.get("modelFile")
        self.model_pt_path = str(folder / serialized) if serialized else None
        if model_file:
            self.model = self._load_pickled_model(str(folder), model_file, self.model_pt_path)
            self.model.to(self.device)
            self.model.eval()
        elif self.model_pt_path and self.model_pt_path.endswith(".pt"):
            self.model = self._load_torchscript_model(self.model_pt_path)
            self.model.eval()
        else:
            found = f"{serialized} without a model file" if serialized else "neither a model file nor a serialized file"
            raise RuntimeError(f"No model weights could be loaded: the manifest names {found}")
        self.mapping = load_label_mapping(folder / "index_to_name.json")
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        assert self.device is not None
        return load_torchscript(Path(model_pt_path), self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        assert self.device is not None
        return load_eager(Path(model_dir, model_file), Path(model_pt_path) if model_pt_path else None, self.device)

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Any:
        """Rows → model input."""
        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Model input → model output."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> list[Any]:
        """Model output → one result per row."""
        result: list[Any] = data.tolist()
        return result

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> Any:
        """The whole way for one batch; the server calls this."""
        began = time.perf_counter()
        self.context = context
        if self._is_describe():
            return [self.describe_handle()]
        inputs = self.preprocess(data)
        if self._is_explain():
            output = self.explain_handle(inputs, data)
        else:
            output = self.postprocess(self.inference(inputs))
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return output

    def explain_handle(self, data_preprocess: Any, raw_data: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Explain the first request through `get_insights`, which subclasses provide."""
        row = raw_data[0]
        inputs = row.get("data") or row.get("body")
        target = row.get("target") or 0
        insights: list[Any] = self.get_insights(data_preprocess, inputs, target)  # type: ignore[attr-defined]
        return insights

    def describe_handle(self) -> Any:
        """What `describe?customized=true` shows; nothing unless a subclass says more."""
        return None

    def get_device(self) -> torch.device | None:
        """The device the model is on."""
        return self.device

    def _is_explain(self) -> bool:
        assert self.context is not None
        if self.context.get_request_header(0, "explain") == "True":
            self.explain = True
            return True
        return False

    def _is_describe(self) -> bool:
        assert self.context is not None
        return bool(self.context.get_request_header(0, "describe") == "True")
