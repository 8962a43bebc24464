"""HandlerService: a handler called with messages of the OTF protocol, and the loader of such a service."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import read_manifest
from flambeau.config.model import read_options
from flambeau.torchserve import TORCHSERVE_VERSION
from flambeau.torchserve.worker_protocol.protocol import PREDICT_MSG, create_predict_response, retrieve_msg
from flambeau.worker.context import Context, RequestProcessor
from flambeau.worker.failures import to_failed
from flambeau.worker.loader import in_envelope, load_handler
from flambeau.worker.results import check_result

PREDICTION_METRIC = "PredictionTime"
logger = logging.getLogger(__name__)

Batch = Sequence[Mapping[str, Any]]
Inputs = tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]


class HandlerService:
    """A loaded model: its context and its entry point."""

    cl_socket: Any = None  # for intermediate responses

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
        config = read_options(Path(model_dir) / model["configFile"]) if model.get("configFile") else {}
        self._context = Context(
            *(model_name, model_dir, manifest, batch_size or 1, gpu, TORCHSERVE_VERSION),
            limit_max_image_pixels,
            metrics_cache,
            config,
        )
        self._entry_point = entry_point

    @property
    def context(self) -> Context:
        return self._context

    def set_cl_socket(self, cl_socket: Any) -> None:
        """Set the socket for intermediate responses."""
        self.cl_socket = cl_socket

    @staticmethod
    def retrieve_data_for_inference(batch: Batch | None) -> Inputs:
        """Split parsed requests into headers, rows and request ids."""
        if batch is None:
            raise ValueError("Received invalid inputs")
        return (
            [RequestProcessor(_headers(request)) for request in batch],
            [{item["name"]: item["value"] for item in request["parameters"]} for request in batch],
            {i: request["requestId"].decode("utf-8") for i, request in enumerate(batch)},
        )

    def predict(self, batch: Batch) -> bytearray | None:
        """Call the handler and encode its result or its error."""
        inputs = HandlerService.retrieve_data_for_inference(batch)
        begin(self.context, inputs, self.cl_socket)
        began = time.perf_counter()
        try:
            assert self._entry_point is not None
            result = self._entry_point(inputs[1], self.context)
        except Exception as error:
            return failure(error, inputs)
        return answer(result, self.context, inputs, began)


class AsyncService:
    """Runs requests of an `async def` handler concurrently, each with its own context."""

    def __init__(self, service: HandlerService) -> None:
        self.service = service

    async def predict(self, batch: Batch) -> bytearray | None:
        """Call the handler and encode its result or its error."""
        inputs = HandlerService.retrieve_data_for_inference(batch)
        context = copy.deepcopy(self.service.context)
        begin(context, inputs, self.service.cl_socket)
        began = time.perf_counter()
        try:
            assert self.service._entry_point is not None
            result = await self.service._entry_point(inputs[1], context)
        except Exception as error:
            return failure(error, inputs)
        return answer(result, context, inputs, began)

    def run(self) -> str | None:
        """Answer requests until the peer disconnects; return the traceback of a failure."""
        try:
            asyncio.get_event_loop().run_until_complete(self._answer_all())
        except Exception:
            return traceback.format_exc()
        return None

    async def _answer_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                command, batch = await asyncio.to_thread(retrieve_msg, self.service.cl_socket)
                if command != PREDICT_MSG:
                    raise ValueError(f"Unexpected command: {bytes(command)!r}")
                for request in batch:
                    tasks.create_task(self._answer([request]))

    async def _answer(self, batch: Batch) -> None:
        if (response := await self.predict(batch)) is not None:
            self.service.cl_socket.sendall(response)


def begin(context: Context, inputs: Inputs, cl_socket: Any) -> None:
    """Set the context to a batch."""
    context.request_processor, _, context.request_ids = inputs
    metrics: Any = context.metrics
    metrics.request_ids = context.request_ids
    context.cl_socket = cl_socket


def answer(result: Any, context: Context, inputs: Inputs, began: float) -> bytearray | None:
    """Check, measure and encode a handler's result."""
    _, rows, ids = inputs
    try:
        values = check_result(result, len(rows))
    except Exception as error:
        return failure(error, inputs)
    context.metrics.add_time(PREDICTION_METRIC, round((time.perf_counter() - began) * 1000, 2))
    return create_predict_response(values, ids, "Prediction success", 200, context=context)


def failure(error: Exception, inputs: Inputs) -> bytearray | None:
    """Log and encode a handler's exception; the client sees only its status and message."""
    failed = to_failed([], error)
    logger.warning("%s (%d)\n%s", failed.message, failed.status, failed.detail)
    return create_predict_response(None, inputs[2], failed.message, failed.status)


def emit_metrics(metrics: Iterable[Any]) -> None:
    for metric in metrics or ():
        logger.info("[METRICS]%s", metric)


def _headers(request: Mapping[str, Any]) -> dict[str, Any]:
    types: dict[str, Any] = {item["name"]: {"content-type": item["contentType"]} for item in request["parameters"]}
    sent = request.get("headers") or ()
    return types | {item["name"].decode("utf-8"): item["value"].decode("utf-8") for item in sent}


class ModelLoader(ABC):
    @abstractmethod
    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str | None = None,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
    ) -> HandlerService:
        """Find the handler, initialize it and return its service."""


class TsModelLoader(ModelLoader):
    """Loads a model by the rules of this server's workers."""

    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str | None = None,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> HandlerService:
        folder = Path(model_dir)
        manifest = read_manifest(folder)
        raw = dict(manifest.raw) if manifest else None
        service = HandlerService(
            *(model_name, model_dir, raw, None, gpu_id, batch_size), limit_max_image_pixels, metrics_cache
        )
        value = handler or (manifest.handler if manifest else "")
        entry = load_handler(value, folder, service.context, _event_loop())
        service._entry_point = in_envelope(entry, envelope or "", folder).handle
        return service


class ModelLoaderFactory:
    @staticmethod
    def get_model_loader() -> TsModelLoader:
        return TsModelLoader()


def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop that `initialize` may use and that later calls run on."""
    policy = asyncio.get_event_loop_policy()
    try:
        return policy.get_event_loop()
    except RuntimeError:
        loop = policy.new_event_loop()
        policy.set_event_loop(loop)
        return loop
