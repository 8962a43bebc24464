"""TorchServe's import names: re-exports and small shims, no behavior."""

from flambeau import TORCHSERVE_VERSION

__version__ = TORCHSERVE_VERSION
