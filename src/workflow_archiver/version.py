"""The version of TorchServe's workflow archiver whose interface this is."""

from flambeau.torchserve import WORKFLOW_ARCHIVER_VERSION

__version__ = WORKFLOW_ARCHIVER_VERSION
