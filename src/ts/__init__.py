"""TorchServe's import names: re-exports and small shims, no behaviour."""

from flambeau import TORCHSERVE_VERSION

__version__ = TORCHSERVE_VERSION
