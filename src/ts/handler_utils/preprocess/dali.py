"""What handlers import from `ts.handler_utils.preprocess.dali`."""

from flambeau.torchserve.handlers.dali import get_dali_pipeline as get_dali_pipeline
