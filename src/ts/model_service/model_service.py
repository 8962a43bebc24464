"""What handlers of the oldest archives import from `ts.model_service.model_service`."""

from flambeau.torchserve.handlers.legacy import ModelService as ModelService
from flambeau.torchserve.handlers.legacy import SingleNodeService as SingleNodeService
