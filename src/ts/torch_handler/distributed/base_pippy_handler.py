"""What handlers import from `ts.torch_handler.distributed.base_pippy_handler`."""

from flambeau.torchserve.handlers.distributed import BasePippyHandler as BasePippyHandler
