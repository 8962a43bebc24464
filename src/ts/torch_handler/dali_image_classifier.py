"""What handlers import from `ts.torch_handler.dali_image_classifier`."""

from flambeau.torchserve.handlers.dali import DALIImageClassifier as DALIImageClassifier
