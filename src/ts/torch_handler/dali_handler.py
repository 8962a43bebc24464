"""What handlers import from `ts.torch_handler.dali_handler`."""

from flambeau.handlers.vision.dali import DALIHandler as DALIHandler
