"""What code written for TorchServe imports from `ts.service`: a handler's entry point, called with parsed messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ts
from flambeau.errors import PredictionException as PredictionException
from flambeau.torchserve.otf_protocol import create_predict_response
from flambeau.worker.context import Context, RequestProcessor
from flambeau.worker.failures import to_failed
from flambeau.worker.results import check_result
from ts.utils.util import get_yaml_config

PREDICTION_METRIC = "PredictionTime"
logger = logging.getLogger(__name__)

Batch = Sequence[Mapping[str, Any]]
Inputs = tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]


class Service:
    """A loaded model: its context, and the entry point that answers batches."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Any,
        entry_point: Callable[..., Any] | None,
        gpu: int | None,
        batch_size: int | None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> None:
        model = manifest.get("model", {}) if isinstance(manifest, Mapping) else {}
        config = get_yaml_config(Path(model_dir) / model["configFile"]) if model.get("configFile") else {}
        self._context = Context(
            *(model_name, model_dir, manifest, batch_size or 1, gpu, ts.__version__),
            limit_max_image_pixels,
            metrics_cache,
            config,
        )
        self._entry_point = entry_point
        self.cl_socket: Any = None

    @property
    def context(self) -> Context:
        """What the handler is told."""
        return self._context

    def set_cl_socket(self, cl_socket: Any) -> None:
        """Where chunks are sent."""
        self.cl_socket = cl_socket

    @staticmethod
    def retrieve_data_for_inference(batch: Batch | None) -> Inputs:
        """The headers, rows and request ids of a batch of parsed requests."""
        if batch is None:
            raise ValueError("Received invalid inputs")
        return (
            [RequestProcessor(_headers(request)) for request in batch],
            [{item["name"]: item["value"] for item in request["parameters"]} for request in batch],
            {i: request["requestId"].decode("utf-8") for i, request in enumerate(batch)},
        )

    def predict(self, batch: Batch) -> bytearray | None:
        """Call the handler; the answer is encoded, whatever happens."""
        inputs = Service.retrieve_data_for_inference(batch)
        begin(self.context, inputs, self.cl_socket)
        began = time.perf_counter()
        try:
            assert self._entry_point is not None
            result = self._entry_point(inputs[1], self.context)
        except Exception as error:
            return failure(error, inputs)
        return answer(result, self.context, inputs, began)


def begin(context: Context, inputs: Inputs, cl_socket: Any) -> None:
    """Turn a context to a batch."""
    context.request_processor, _, context.request_ids = inputs
    metrics: Any = context.metrics
    metrics.request_ids = context.request_ids
    context.cl_socket = cl_socket


def answer(result: Any, context: Context, inputs: Inputs, began: float) -> bytearray | None:
    """A handler's result, checked, measured and encoded."""
    _, rows, ids = inputs
    try:
        values = check_result(result, len(rows))
    except Exception as error:
        return failure(error, inputs)
    context.metrics.add_time(PREDICTION_METRIC, round((time.perf_counter() - began) * 1000, 2))
    return create_predict_response(values, ids, "Prediction success", 200, context=context)


def failure(error: Exception, inputs: Inputs) -> bytearray | None:
    """A handler's exception, logged and encoded: the client learns its status and its text, no more."""
    failed = to_failed([], error)
    logger.warning("%s (%d)\n%s", failed.message, failed.status, failed.detail)
    return create_predict_response(None, inputs[2], failed.message, failed.status)


def emit_metrics(metrics: Iterable[Any]) -> None:
    """Write metrics to the log."""
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)


def _headers(request: Mapping[str, Any]) -> dict[str, Any]:
    types: dict[str, Any] = {item["name"]: {"content-type": item["contentType"]} for item in request["parameters"]}
    sent = request.get("headers") or ()
    return types | {item["name"].decode("utf-8"): item["value"].decode("utf-8") for item in sent}
