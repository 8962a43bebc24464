"""TorchServe's import name for making workflow archives; what it does is in `flambeau.archive`."""

from flambeau import __version__ as __version__
