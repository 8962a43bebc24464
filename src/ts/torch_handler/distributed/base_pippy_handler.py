"""What handlers import from `ts.torch_handler.distributed.base_pippy_handler`."""

from flambeau.torchserve.handlers.pippy import BasePippyHandler as BasePippyHandler
