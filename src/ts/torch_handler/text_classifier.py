"""What handlers import from `ts.torch_handler.text_classifier`."""

from flambeau.handlers.text.classifier import TextClassifier as TextClassifier
