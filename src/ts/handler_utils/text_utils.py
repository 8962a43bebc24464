"""What handlers import from `ts.handler_utils.text_utils`."""

from flambeau.handlers.text_classifier import get_tokenizer as get_tokenizer
from flambeau.handlers.text_classifier import ngrams_iterator as ngrams_iterator
