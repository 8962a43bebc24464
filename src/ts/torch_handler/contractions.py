"""What handlers import from `ts.torch_handler.contractions`."""

from flambeau.handlers.text_normalization import CONTRACTION_MAP as CONTRACTION_MAP
