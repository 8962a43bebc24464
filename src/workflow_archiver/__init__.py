"""TorchServe's import names for making workflow archives: re-exports, no behavior."""

from flambeau.torchserve import WORKFLOW_ARCHIVER_VERSION

__version__ = WORKFLOW_ARCHIVER_VERSION
