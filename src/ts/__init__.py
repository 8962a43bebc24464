"""TorchServe's import names: re-exports, no behavior."""

from flambeau.torchserve import TORCHSERVE_VERSION

__version__ = TORCHSERVE_VERSION
