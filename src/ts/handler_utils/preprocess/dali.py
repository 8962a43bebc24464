"""What handlers import from `ts.handler_utils.preprocess.dali`."""

from flambeau.handlers.vision.dali import get_dali_pipeline as get_dali_pipeline
