"""The version of TorchServe whose interface this is."""

from flambeau.torchserve import TORCHSERVE_VERSION

__version__ = TORCHSERVE_VERSION
