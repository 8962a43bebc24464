"""The version of TorchServe's archiver whose interface this is."""

from flambeau.torchserve import TORCHSERVE_VERSION

__version__ = TORCHSERVE_VERSION
