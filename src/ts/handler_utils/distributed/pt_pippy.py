"""What handlers import from `ts.handler_utils.distributed.pt_pippy`."""

from flambeau.torchserve.handlers.distributed import get_pipeline_driver as get_pipeline_driver
from flambeau.torchserve.handlers.distributed import initialize_rpc_workers as initialize_rpc_workers
