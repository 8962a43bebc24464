"""What handlers import from `ts.torch_handler.text_handler`."""

from flambeau.handlers.text_classifier import TextHandler as TextHandler
