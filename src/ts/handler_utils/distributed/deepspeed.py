"""What handlers import from `ts.handler_utils.distributed.deepspeed`."""

from flambeau.torchserve.handlers.distributed import create_checkpoints_json as create_checkpoints_json
from flambeau.torchserve.handlers.distributed import get_ds_engine as get_ds_engine
