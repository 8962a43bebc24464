"""TorchServe's import name for the service around a handler."""

from flambeau.errors import PredictionException as PredictionException
from flambeau.torchserve import import_names
from flambeau.torchserve.worker_protocol import service
from flambeau.torchserve.worker_protocol.protocol import create_predict_response as create_predict_response
from flambeau.torchserve.worker_protocol.service import PREDICTION_METRIC as PREDICTION_METRIC
from flambeau.torchserve.worker_protocol.service import HandlerService
from flambeau.torchserve.worker_protocol.service import emit_metrics as emit_metrics

Service = HandlerService

import_names.forward(__name__, service, Service="HandlerService")
