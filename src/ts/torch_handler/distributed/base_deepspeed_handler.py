"""What handlers import from `ts.torch_handler.distributed.base_deepspeed_handler`."""

from flambeau.torchserve.handlers.distributed import BaseDeepSpeedHandler as BaseDeepSpeedHandler
