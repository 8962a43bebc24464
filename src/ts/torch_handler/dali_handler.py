"""What handlers import from `ts.torch_handler.dali_handler`."""

from flambeau.torchserve.handlers.dali import DALIHandler as DALIHandler
