"""What handlers import from `ts.torch_handler.text_handler`."""

from flambeau.handlers.text.classifier import TextHandler as TextHandler
