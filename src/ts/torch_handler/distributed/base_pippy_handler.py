"""What handlers import from `ts.torch_handler.distributed.base_pippy_handler`."""

from flambeau.handlers.distributed.pippy import BasePippyHandler as BasePippyHandler
