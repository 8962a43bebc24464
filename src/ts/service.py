"""TorchServe's import name for the service around a handler."""

from flambeau.errors import PredictionException as PredictionException
from flambeau.torchserve.otf.service import PREDICTION_METRIC as PREDICTION_METRIC
from flambeau.torchserve.otf.service import HandlerService
from flambeau.torchserve.otf.service import emit_metrics as emit_metrics

Service = HandlerService
