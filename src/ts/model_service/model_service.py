"""What handlers of the oldest archives import from `ts.model_service.model_service`."""

from flambeau.torchserve.handlers.model_service import ModelService as ModelService
from flambeau.torchserve.handlers.model_service import SingleNodeService as SingleNodeService
