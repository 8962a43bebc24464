"""TorchServe's import names for making workflow archives: re-exports, no behavior."""

from flambeau import __version__ as __version__
