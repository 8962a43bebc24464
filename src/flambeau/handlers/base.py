"""BaseHandler: initialize → preprocess → inference → postprocess behind handle(data, context)."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import HandlerError
from flambeau.handlers import pipelining, profiling
from flambeau.handlers.labels import load_label_mapping
from flambeau.handlers.loading.compiling import compile_model, read_pt2
from flambeau.handlers.loading.device import choose_device, dtype_named, prepare
from flambeau.handlers.loading.formats import SUPPORTED, WEIGHTS, Format, recognize
from flambeau.handlers.loading.programs import load_whole
from flambeau.handlers.loading.weights import load_eager
from flambeau.handlers.options import read_weights_only
from flambeau.handlers.tensors import client_faults, floating_dtype_of, is_about_dtype, to_rows, to_tensor
from flambeau.handlers.timing import timed

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]


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
        self.profiler_args: dict[str, Any] = {}
        self.model_yaml_config: Mapping[str, Any] = {}
        self.dtype: torch.dtype | None = None  # of the model and its inputs, where the model-config names one

    # ---- loading ----

    def initialize(self, context: Context) -> None:
        """Choose the device, load the model, compile it if that is asked for, read the labels."""
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        self.device, self.map_location = choose_device(properties.get("gpu_id"))
        prepare(self.device)
        entry: Mapping[str, Any] = (self.manifest or {}).get("model", {})
        serialized, model_file = entry.get("serializedFile"), entry.get("modelFile")
        self.model_pt_path = str(folder / serialized) if serialized else None
        self.model = self._load(str(folder), model_file)
        self._place()
        if options := read_pt2(self.model_yaml_config.get("pt2")):
            self.model = compile_model(self.model, options)
        self.mapping = load_label_mapping(folder / "index_to_name.json")
        self.initialized = True

    def _load(self, folder: str, model_file: str | None) -> Any:
        kind = recognize(Path(self.model_pt_path)) if self.model_pt_path else None
        if model_file and (kind is None or kind in WEIGHTS):
            return self._load_pickled_model(folder, model_file, self.model_pt_path)
        if model_file and kind is not None:
            logger.info("%s is %s, so %s is not used", Path(self.model_pt_path or "").name, kind.value, model_file)
        if self.model_pt_path is None:
            raise RuntimeError(
                "No model weights could be loaded: the manifest names neither a serialized file nor a model file. "
                f"Pack one with --serialized-file; it may be {SUPPORTED}"
            )
        if kind is Format.TORCHSCRIPT:
            return self._load_torchscript_model(self.model_pt_path)
        if kind is Format.LIBRARY:
            return self._load_torch_export_aot_compile(self.model_pt_path)
        assert self.device is not None
        return load_whole(Path(self.model_pt_path), self.device, weights_only=self._weights_only)

    @property
    def _weights_only(self) -> bool:
        return read_weights_only(self.model_yaml_config)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        assert self.device is not None
        return load_whole(Path(model_pt_path), self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        assert self.device is not None
        return load_eager(
            Path(model_dir, model_file),
            Path(model_pt_path) if model_pt_path else None,
            self.device,
            weights_only=self._weights_only,
            class_name=self.model_yaml_config.get("model_class"),
        )

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        assert self.device is not None
        return load_whole(Path(model_so_path), self.device)

    def _use_torch_export_aot_compile(self) -> bool:
        section = self.model_yaml_config.get("pt2")
        export = section.get("export") if isinstance(section, dict) else None
        return isinstance(export, dict) and bool(export.get("aot_compile"))

    def _place(self) -> None:
        """Modules go to the device, in the dtype the model-config names; other callables are where they are."""
        name = self.model_yaml_config.get("dtype")
        self.dtype = dtype_named(str(name)) if name else None
        if not isinstance(self.model, torch.nn.Module):
            return
        self.model.to(device=self.device, dtype=self.dtype)
        if not isinstance(self.model, torch.fx.GraphModule):  # an exported program has one mode only
            self.model.eval()

    # ---- the stages ----

    @timed
    def preprocess(self, data: Rows) -> Any:
        """Rows → model input: numbers in JSON, or the bytes of a .npy file."""
        return to_tensor(data, self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Model input → model output."""
        if self.dtype is not None and data.is_floating_point():
            data = data.to(self.dtype)
        with torch.inference_mode():
            data = data.to(self.device)
            try:
                return self.model(data, *args, **kwargs)
            except Exception as error:
                if not is_about_dtype(data, error):
                    raise
                return self.model(data.to(floating_dtype_of(self.model)), *args, **kwargs)  # JSON's 1 may mean 1.0

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Model output → one result per row."""
        return to_rows(data)

    # ---- a batch ----

    def handle(self, data: Rows, context: Context) -> Any:
        """The whole way for one batch; the server calls this."""
        began = time.perf_counter()
        self.context = context
        if self._is_describe():
            return [self.describe_handle()]
        with client_faults():
            if profiling.is_wanted():
                output, _ = self._infer_with_profiler(data)
            elif self._is_explain():
                output = self.explain_handle(self.preprocess(data), data)
            else:
                output = self.postprocess(self.inference(self.preprocess(data)))
        self._note_time(context, began)
        return output

    def pipeline(self) -> tuple[Callable[[Rows], Any], Callable[[Any, Context], Any]]:
        """`handle` in two halves, rows → inputs and inputs → results, which may run beside each other."""
        if type(self).handle is not BaseHandler.handle or "handle" in vars(self):
            raise HandlerError("pipeline: true needs the handle() of BaseHandler; this handler has one of its own")
        if reason := pipelining.why_not(self):
            raise HandlerError(f"pipeline: true is not possible: {reason}")
        return self._first_half, self._second_half

    def _first_half(self, data: Rows) -> Any:
        with client_faults():
            return self.preprocess(data)

    def _second_half(self, inputs: Any, context: Context) -> Any:
        began = time.perf_counter()
        self.context = context
        with client_faults():
            output = self.postprocess(self.inference(inputs))
        self._note_time(context, began)
        return output

    @staticmethod
    def _note_time(context: Context, began: float) -> None:
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")

    # ---- explaining and describing ----

    def explain_handle(self, data_preprocess: Any, raw_data: Rows) -> list[Any]:
        """Explain the first request through `get_insights`, which subclasses provide."""
        if not hasattr(self, "get_insights"):
            raise HandlerError(f"{type(self).__name__} cannot explain: it has no get_insights(inputs, raw, target)")
        row = raw_data[0]
        fields = row if isinstance(row, Mapping) else {"data": row}  # an envelope has taken the row apart
        inputs = fields.get("data") or fields.get("body")
        target = fields.get("target") or 0
        insights: list[Any] = self.get_insights(data_preprocess, inputs, target)
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

    def _infer_with_profiler(self, data: Rows) -> tuple[Any, Any]:
        return profiling.infer_with_profiler(self, data)
