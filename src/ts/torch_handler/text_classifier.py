"""What handlers import from `ts.torch_handler.text_classifier`."""

from flambeau.handlers.text import TextClassifier as TextClassifier
