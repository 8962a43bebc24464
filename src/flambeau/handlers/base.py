"""BaseHandler: the base class of handlers.

A worker creates one instance, calls `initialize(context)` once and `handle(data, context)` for each batch. `handle`
runs three stages: `preprocess` (requests → model input), `inference` (input → output) and `postprocess` (output →
one result per request). A handler overrides the stages it needs.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.device import choose_device, dtype_named, prepare
from flambeau.handlers.labels import load_label_mapping
from flambeau.handlers.loaders.formats import SUPPORTED, WEIGHTS, ModelFormat, recognize
from flambeau.handlers.loaders.programs import load_whole, program_tensors
from flambeau.handlers.loaders.torch_compile import compile_model, read_pt2
from flambeau.handlers.loaders.weights import load_eager
from flambeau.handlers.options import check_options, read_weights_only, warn_of_misspelled_keys
from flambeau.handlers.profiler import is_profiler_enabled, run_with_profiler, timed
from flambeau.handlers.request_rows import explained
from flambeau.handlers.stage_overlap import find_shared_state
from flambeau.handlers.tensor_io import client_errors, floating_dtype_of, is_dtype_error, to_rows, to_tensor

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]  # one per request: `data` or `body`, or the fields of a form


class BaseHandler(abc.ABC):  # noqa: B024  (not abstract: it serves models that need no code)
    """Loads the model of an archive and runs it on tensors.

    Used as it is, it takes numbers as JSON or .npy and returns them as JSON.
    """

    handler_keys: Sequence[str] = ()  # keys of the `handler` section that this class reads
    example: Any = None  # a request body, for the command that the server prints
    names_classes = False  # results have the names of index_to_name.json, so that its absence is worth a warning

    def __init__(self) -> None:
        self.model: Any = None  # a torch module, or any callable with the same arguments
        self.mapping: dict[str, str] | None = None  # class index → label, from index_to_name.json
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None  # of model and inputs, if model-config.yaml names one
        self.map_location: str | None = None
        self.initialized = False
        self.context: Context | None = None  # of the current batch
        self.manifest: Mapping[str, Any] | None = None
        self.model_yaml_config: Mapping[str, Any] = {}
        self.model_pt_path: str | None = None  # the serialized file
        self.profiler_args: dict[str, Any] = {}  # for torch.profiler.profile
        self.explain = False
        self.target = 0

    # ---- loading ----

    def initialize(self, context: Context) -> None:
        """Choose the device, load the model, compile it if model-config.yaml says so, and read the labels."""
        self.context = context
        self.manifest = context.manifest
        self.model_yaml_config = context.model_yaml_config or {}
        self._check_options()
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        self.device, self.map_location = choose_device(properties.get("gpu_id"))
        prepare(self.device)
        entry: Mapping[str, Any] = (self.manifest or {}).get("model", {})
        serialized, model_file = entry.get("serializedFile"), entry.get("modelFile")
        self.model_pt_path = str(folder / serialized) if serialized else None
        self.model = self._load(str(folder), model_file)
        if type(self) is BaseHandler and isinstance(self.model, torch.fx.GraphModule):
            from flambeau.handlers.loaders.torch_export import example_of_program

            self.example = example_of_program(self.model)  # a subclass may expect other requests than its model
        self._move_to_device()
        options = read_pt2(self.model_yaml_config.get("pt2"))
        if options is not None:  # none are the defaults of torch.compile
            self.model = compile_model(self.model, options)
        labels = folder / "index_to_name.json"
        if self.names_classes or labels.is_file():
            self.mapping = load_label_mapping(labels)
        self.initialized = True

    def _check_options(self) -> None:
        warn_of_misspelled_keys(self.model_yaml_config)
        is_own = not type(self).__module__.startswith("flambeau.handlers.")
        if not is_own or self.handler_keys:  # a class of your own may have any keys
            check_options(self.model_yaml_config, self.handler_keys, type(self).__name__, is_own=is_own)

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
        if kind is ModelFormat.TORCHSCRIPT:
            return self._load_torchscript_model(self.model_pt_path)
        if kind is ModelFormat.LIBRARY:
            return self._load_torch_export_aot_compile(self.model_pt_path)
        assert self.device is not None
        return load_whole(Path(self.model_pt_path), self.device, weights_only=self._weights_only)

    @property
    def _weights_only(self) -> bool:
        return read_weights_only(self.model_yaml_config)

    # Existing handlers override or call the next four methods under these names.

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

    def _move_to_device(self) -> None:
        name = self.model_yaml_config.get("dtype")
        self.dtype = dtype_named(str(name)) if name else None
        if not isinstance(self.model, torch.nn.Module):
            return  # compiled programs and ONNX sessions were loaded onto their device
        self.model.to(device=self.device, dtype=self.dtype)
        if not isinstance(self.model, torch.fx.GraphModule):  # an exported program has no train and eval modes
            self.model.eval()

    # ---- the stages ----

    @timed
    def preprocess(self, data: Rows) -> Any:
        """Requests → one tensor: numbers in JSON, or the bytes of a .npy file, stacked."""
        return to_tensor(data, self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model in inference mode, on its device and in its dtype."""
        if self.dtype is not None and data.is_floating_point():
            data = data.to(self.dtype)
        with torch.inference_mode():
            data = data.to(self.device)
            try:
                return self.model(data, *args, **kwargs)
            except Exception as error:
                if not is_dtype_error(data, error):
                    raise
                # In JSON, 1 may mean 1.0: try again with the model's dtype.
                return self.model(data.to(floating_dtype_of(self.model)), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Model output → a list with one JSON value, text or bytes per request."""
        return to_rows(data)

    # ---- a batch ----

    def handle(self, data: Rows, context: Context) -> Any:
        """Run the stages on a batch. Return one result per request, in their order.

        Failures that the input caused (a wrong shape, a broken image) become a 400 response.
        """
        began = time.perf_counter()
        self.context = context
        if self._is_describe():
            return [self.describe_handle()]
        with client_errors():
            if is_profiler_enabled():
                output, _ = self._infer_with_profiler(data)
            elif self._is_explain():
                output = self.explain_handle(self.preprocess(data), data)
            else:
                output = self.postprocess(self.inference(self.preprocess(data)))
        self._report_time(context, began)
        return output

    def pipeline(self) -> tuple[Callable[[Rows], Any], Callable[[Any, Context], Any]]:
        """`handle` in two halves, for `pipeline: true`: requests → inputs, and inputs → results.

        The worker runs the first half of a batch while the second half of the batch before it runs.
        """
        if type(self).handle is not BaseHandler.handle or "handle" in vars(self):
            raise HandlerError("pipeline: true needs the handle() of BaseHandler; this handler has one of its own")
        if reason := find_shared_state(self):
            raise HandlerError(f"pipeline: true is not possible: {reason}")
        return self._first_half, self._second_half

    def _first_half(self, data: Rows) -> Any:
        with client_errors():
            return self.preprocess(data)

    def _second_half(self, inputs: Any, context: Context) -> Any:
        began = time.perf_counter()
        self.context = context
        with client_errors():
            output = self.postprocess(self.inference(inputs))
        self._report_time(context, began)
        return output

    @staticmethod
    def _report_time(context: Context, began: float) -> None:
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")

    # ---- explanations and descriptions ----

    def explain_handle(self, data_preprocess: Any, raw_data: Rows) -> list[Any]:
        """Explain the first request with `get_insights(inputs, raw, target)`, which a subclass defines."""
        if not hasattr(self, "get_insights"):
            raise BadRequest(
                f"{type(self).__name__} has no explanations; add get_insights(self, inputs, raw, target) to the handler"
            )
        insights: list[Any] = self.get_insights(data_preprocess, *explained(raw_data[0]))
        return insights

    def describe_handle(self) -> Any:
        """Extra information for `GET /models/NAME?customized=true`; a subclass may return a JSON value."""
        return None

    def tensor_metadata(self) -> Any:
        """The tensors of one request for KServe's metadata, without the batch axis; None if they are not known.

        Only the stages of this class itself are known to take and return the program's own tensors.
        """
        return program_tensors(self.model) if type(self) is BaseHandler else None

    def get_device(self) -> torch.device | None:
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
        return run_with_profiler(self, data, is_explain=self._is_explain())
