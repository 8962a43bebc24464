"""What handlers import from `ts.torch_handler.distributed.base_deepspeed_handler`."""

from flambeau.handlers.distributed.deepspeed import BaseDeepSpeedHandler as BaseDeepSpeedHandler
