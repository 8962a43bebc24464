"""What handlers import from `ts.torch_handler.densenet_handler`."""

from flambeau.torchserve.handlers.legacy import DenseNetHandler as DenseNetHandler
