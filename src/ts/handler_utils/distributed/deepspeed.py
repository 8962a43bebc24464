"""What handlers import from `ts.handler_utils.distributed.deepspeed`."""

from flambeau.torchserve.handlers.deepspeed import create_checkpoints_json as create_checkpoints_json
from flambeau.torchserve.handlers.deepspeed import get_ds_engine as get_ds_engine
