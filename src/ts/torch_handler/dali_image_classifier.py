"""What handlers import from `ts.torch_handler.dali_image_classifier`."""

from flambeau.handlers.vision.dali import DALIImageClassifier as DALIImageClassifier
