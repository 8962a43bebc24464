"""What scripts import from `ts.utils.hf_utils`."""

from flambeau.torchserve.handlers.functions import download_model as download_model
