"""TorchServe's import names: re-exports and small shims, no behaviour."""

from flambeau import __version__ as __version__
