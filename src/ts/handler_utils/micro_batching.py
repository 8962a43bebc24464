"""What handlers import from `ts.handler_utils.micro_batching`."""

from flambeau.torchserve.handlers.micro_batching import HANDLER_METHODS as HANDLER_METHODS
from flambeau.torchserve.handlers.micro_batching import MicroBatching as MicroBatching
from flambeau.torchserve.handlers.micro_batching import WorkerThread as WorkerThread
from flambeau.torchserve.handlers.micro_batching import execute_call as execute_call
