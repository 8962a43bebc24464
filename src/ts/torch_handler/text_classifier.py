"""What handlers import from `ts.torch_handler.text_classifier`."""

from flambeau.handlers.text_classifier import TextClassifier as TextClassifier
