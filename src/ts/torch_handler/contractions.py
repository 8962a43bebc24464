"""What handlers import from `ts.torch_handler.contractions`."""

from flambeau.handlers.text.contractions import CONTRACTION_MAP as CONTRACTION_MAP
