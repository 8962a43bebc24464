"""What handlers import from `ts.torch_handler.image_classifier`."""

from flambeau.handlers.vision_handlers import ImageClassifier as ImageClassifier
